# SPDX-License-Identifier: Apache-2.0
"""The command `triton-omni`: `say`, `ask`, `chat` and `play` talk to the model, `models` and `ready` ask about the
server, `bench` (in `bench/cli.py`) measures it, `capacity` says what was measured in GPUs and money.

Text goes to stdout, everything about it to stderr. Exit codes: 0 done, 1 refused or failed, 2 wrong
usage, 130 interrupted (what was received is kept).
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .address import DEFAULT_URL
from .answer import Answer, client_of
from .bench.cli import bench
from .commands.ask import EXAMPLES as ASK_EXAMPLES
from .commands.ask import ask
from .commands.capacity import EXAMPLES as CAPACITY_EXAMPLES
from .commands.capacity import report_capacity
from .commands.chat import EXAMPLES as CHAT_EXAMPLES
from .commands.chat import chat
from .commands.models import EXAMPLES as MODELS_EXAMPLES
from .commands.models import models
from .commands.options import AsJson, Model, Output, Url, examples
from .commands.play import EXAMPLES as PLAY_EXAMPLES
from .commands.play import play
from .messages import Request
from .options import Files, StageJson, json_object, known_audio_format, read_media
from .terminal import EXIT_CODES, FAILED, errors, print_json

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Talk to a triton-omni server.", epilog=EXIT_CODES)


@app.command(
    epilog=examples(
        'say "What is the sea?" -o sea.wav',
        'say "What is in the picture?" --image beach.jpg --voice Ethan --seed 7 -o - | aplay',
        'say "Short, please." --url http://localhost:8000 --json',
    )
)
def say(
    text: Annotated[str, typer.Argument(help="What to say to the model; may be left out beside media.")] = "",
    *,
    output: Output = "",
    image: Annotated[Files, typer.Option(help="Image file to show; may be repeated.")] = None,
    audio: Annotated[Files, typer.Option(help="Audio file to play; may be repeated.")] = None,
    video: Annotated[Files, typer.Option(help="Video file to show; may be repeated.")] = None,
    voice: Annotated[str | None, typer.Option(help="Speaker.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all sampling.")] = None,
    text_only: Annotated[bool, typer.Option("--text-only", help="Ask for no speech.")] = False,
    audio_format: Annotated[str, typer.Option(help="How audio travels: f32, pcm16 or wav.")] = "f32",
    timeout: Annotated[float | None, typer.Option(help="Seconds for the whole reply.")] = None,
    thinker_json: StageJson = "",
    talker_json: StageJson = "",
    token2wav_json: StageJson = "",
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    model: Model = "",
) -> None:
    """Say something and hear the reply; media by options."""
    answer = Answer(url, model, output, as_json)
    options: dict[str, Any] = {
        "modalities": ("text",) if text_only else None,
        "voice": voice,
        "seed": seed,
        "audio_format": known_audio_format(audio_format),
        "timeout": timeout,
        "thinker": json_object("--thinker-json", thinker_json),
        "talker": json_object("--talker-json", talker_json),
        "token2wav": json_object("--token2wav-json", token2wav_json),
    }
    with errors(url, as_json=as_json):
        media = read_media(image, audio, video)
        if not text and not media:
            raise typer.BadParameter("give a text, or media, or both")
        answer.give(Request.ask(text, media, **options))


@app.command(epilog=examples("ready --url localhost:8001 --wait 60"))
def ready(
    url: Url = DEFAULT_URL,
    wait: Annotated[float, typer.Option(help="Seconds to wait for readiness.", min=0)] = 0,
    as_json: AsJson = False,
    model: Model = "",
) -> None:
    """Exit with 0 when the server and its model take requests, else with 1."""
    with errors(url, as_json=as_json):
        client = client_of(url, model)
        obstacle = None if client.wait_ready(wait) else client.obstacle()
    if as_json:
        print_json({"ready": obstacle is None} | ({} if obstacle is None else {"message": obstacle}))
    else:
        typer.echo("ready" if obstacle is None else f"not ready: {url}: {obstacle}", err=obstacle is not None)
    if obstacle is not None:
        raise typer.Exit(FAILED)


app.command(epilog=ASK_EXAMPLES)(ask)
app.command(epilog=CHAT_EXAMPLES)(chat)
app.command(epilog=PLAY_EXAMPLES)(play)
app.command(epilog=MODELS_EXAMPLES)(models)
app.command()(bench)
app.command("capacity", epilog=CAPACITY_EXAMPLES)(report_capacity)


def main() -> None:
    """The console script."""
    app()
