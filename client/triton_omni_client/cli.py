# SPDX-License-Identifier: Apache-2.0
"""The command `triton-omni`: `say` streams a reply to the terminal and a WAV file, `ready` asks for readiness,
`bench` (in `bench/cli.py`) measures.

Text goes to stdout, everything about it to stderr. Exit codes: 0 done, 1 refused or failed, 2 wrong
usage, 130 interrupted (what was received is kept).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NoReturn

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from .audio import WavWriter
from .bench.cli import bench
from .client import DEFAULT_URL, OmniClient
from .errors import BadRequest, ConnectionFailed, OmniClientError, Overloaded
from .http import HttpClient
from .messages import MODEL, UNARY_MODEL, AudioDelta, Delta, Request, TextDelta
from .options import Files, StageJson, json_object, known_audio_format, read_media
from .reply import Reply, ReplyBuilder, Timings

FAILED, USAGE, INTERRUPTED = 1, 2, 130

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Ask a triton-omni server.")

Url = Annotated[
    str, typer.Option(envvar="TRITON_OMNI_URL", help="host:port of gRPC (streams), or http://host:port (one answer).")
]


class Screen:
    """Where a reply is shown: text to `out` as it comes, a progress line to `err` when that is a terminal.

    Where both are one terminal, text and progress are drawn together and the text is printed at the end:
    a line that is redrawn and a line that grows cannot share a place.
    """

    def __init__(self, *, text_to_stderr: bool, silent: bool) -> None:
        self._out = sys.stderr if text_to_stderr else sys.stdout
        self._silent = silent
        err = Console(stderr=True)
        self._live = Live(console=err, transient=True, refresh_per_second=8) if err.is_terminal else None
        self._late = self._live is not None and self._out.isatty()
        self._text = ""

    def show(self, delta: Delta, timings: Timings) -> None:
        """Show one more piece of the reply."""
        if isinstance(delta, TextDelta):
            self._text += delta.text
            if not self._late:
                self._write(delta.text)
        if self._live is not None:
            progress = Text(f"audio {timings.audio:.1f} s", style="dim")
            self._live.update(Text(self._text + "\n") + progress if self._late else progress)

    def _write(self, text: str) -> None:
        if not self._silent:
            self._out.write(text)
            self._out.flush()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Shows progress inside; afterwards the text is complete and ends its line."""
        try:
            with ExitStack() as stack:
                if self._live is not None:
                    stack.enter_context(self._live)
                yield
        finally:
            self._write((self._text if self._late else "") + ("\n" if self._text else ""))


@app.command()
def say(
    text: Annotated[str, typer.Argument(help="What to say to the model; may be left out beside media.")] = "",
    *,
    output: Annotated[
        str, typer.Option("-o", "--output", help="WAV file (24 kHz, mono, PCM16) for the reply; - is stdout.")
    ] = "",
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, no text before.")] = False,
    url: Url = DEFAULT_URL,
    model: Annotated[str, typer.Option(help="Triton model; empty is the one that fits the URL.")] = "",
) -> None:
    """Say something and hear the reply."""
    if as_json and output == "-":
        raise typer.BadParameter("--json and -o - both want stdout")
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
    screen = Screen(text_to_stderr=output == "-", silent=as_json)
    with _errors(url):
        media = read_media(image, audio, video)
        if not text and not media:
            raise typer.BadParameter("give a text, or media, or both")
        reply, interrupted = _run(Request.ask(text, media, **options), url, model, output, screen)
    if as_json:
        typer.echo(json.dumps(_summary(reply, output), ensure_ascii=False))
    else:
        typer.echo(_last_line(reply.timings), err=True)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


@app.command()
def ready(
    url: Url = DEFAULT_URL,
    wait: Annotated[float, typer.Option(help="Seconds to wait for readiness.", min=0)] = 0,
    model: Annotated[str, typer.Option(help="Triton model; empty is the one that fits the URL.")] = "",
) -> None:
    """Exit with 0 when the server and its model take requests, else with 1."""
    with _errors(url):
        is_ready = _client(url, model).wait_ready(wait)
    typer.echo("ready" if is_ready else f"not ready: {url}", err=not is_ready)
    if not is_ready:
        raise typer.Exit(FAILED)


app.command()(bench)


def main() -> None:
    """The console script."""
    app()


def _client(url: str, model: str) -> OmniClient | HttpClient:
    if "://" in url:
        return HttpClient(url, model=model or UNARY_MODEL)
    return OmniClient(url, model=model or MODEL)


def _run(request: Request, url: str, model: str, output: str, screen: Screen) -> tuple[Reply, bool]:
    """The reply, and whether Ctrl-C cut it off; what came before an error or Ctrl-C is in the WAV file."""
    builder = ReplyBuilder()
    interrupted = False
    with ExitStack() as stack:
        writer = stack.enter_context(_wav(output)) if output else None
        stack.enter_context(screen.open())
        deltas = stack.enter_context(_deltas(request, url, model))
        try:
            for delta in deltas:
                builder.add(delta)
                if writer is not None and isinstance(delta, AudioDelta):
                    writer.write(delta.samples)
                screen.show(delta, builder.timings())
        except KeyboardInterrupt:
            interrupted = True
        builder.end()
    return builder.reply(), interrupted


@contextmanager
def _deltas(request: Request, url: str, model: str) -> Iterator[Iterator[Delta]]:
    """The deltas of a reply; leaving before their end cancels the request where the protocol can."""
    client = _client(url, model)
    if isinstance(client, HttpClient):
        yield _deltas_of(client, request)
    else:
        with client, client.stream(request) as stream:
            yield stream


def _deltas_of(client: HttpClient, request: Request) -> Iterator[Delta]:
    """The deltas of a reply that comes in one piece; asked for when the first is taken."""
    reply = client.unary(request)
    yield TextDelta(reply.text)
    yield AudioDelta(reply.audio)
    if reply.info is not None:
        yield reply.info


@contextmanager
def _wav(output: str) -> Iterator[WavWriter]:
    with ExitStack() as stack:
        file: BinaryIO = sys.stdout.buffer if output == "-" else stack.enter_context(_open(output))
        yield stack.enter_context(WavWriter(file))


def _open(output: str) -> BinaryIO:
    try:
        return Path(output).open("wb")
    except OSError as error:
        raise BadRequest(f"{output}: cannot be written: {error.strerror}") from error


@contextmanager
def _errors(url: str) -> Iterator[None]:
    """Turns the client's errors into one sentence on stderr and exit code 1."""
    try:
        yield
    except OmniClientError as error:
        _fail(_sentence(error, url))


def _fail(sentence: str) -> NoReturn:
    typer.echo(f"error: {sentence}", err=True)
    raise typer.Exit(FAILED)


def _sentence(error: OmniClientError, url: str) -> str:
    where = f" (in the {error.stage})" if error.stage else ""
    if isinstance(error, ConnectionFailed):
        return f"no connection to {url}: {error.message}"
    if isinstance(error, Overloaded) and error.retry_after_ms is not None:
        return f"{error.code}: {error.message}{where}; try again in {error.retry_after_ms / 1000:g} s"
    return f"{error.code}: {error.message}{where}"


def _last_line(timings: Timings) -> str:
    parts = []
    if timings.first_text is not None:
        parts.append(f"first text {timings.first_text:.2f} s")
    if timings.first_audio is not None:
        parts.append(f"first audio {timings.first_audio:.2f} s")
    parts.append(f"audio {timings.audio:.1f} s")
    if timings.real_time_factor is not None:
        parts.append(f"real-time factor {timings.real_time_factor:.2f}")
    return " · ".join(parts)


def _summary(reply: Reply, output: str) -> dict[str, Any]:
    timings = asdict(reply.timings) | {"real_time_factor": reply.timings.real_time_factor}
    return {
        "text": reply.text,
        "output": output or None,
        "samples": len(reply.audio),
        "timings": timings,
        "info": None if reply.info is None else dict(reply.info.raw),
    }
