# SPDX-License-Identifier: Apache-2.0
"""`triton-omni chat`: a conversation in the terminal, a line of the user's a turn."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Annotated

import typer

from triton_omni_client.address import DEFAULT_URL
from triton_omni_client.audio import WavWriter
from triton_omni_client.client import OmniClient
from triton_omni_client.conversation import Conversation, SpokenTurn
from triton_omni_client.errors import BadRequest, OmniClientError
from triton_omni_client.interrupt import INTERRUPTED, Interrupts
from triton_omni_client.media import load_media
from triton_omni_client.messages import MODEL, AudioDelta, Media
from triton_omni_client.option_groups import grouped
from triton_omni_client.player import Player
from triton_omni_client.terminal import (
    Screen,
    errors,
    last_line,
    print_json,
    report,
    summary,
    wav_file,
)

from .options import AsJson, Device, Model, Output, StreamUrl, WrittenOptions, examples

EXAMPLES = examples(
    "chat",
    'chat --voice Ethan --system "Be brief." -o talk.wav',
    "chat --play",
    "chat --text-only --json < questions.txt",
)
HELP = """\
/image FILE, /audio FILE, /video FILE   show or play a file with the next message
/voice [NAME]                           speak with this voice; without a name, with the server's own
/reset                                  forget the conversation
/quit                                   leave (also Ctrl-D)
/help                                   this
An empty message sends the files alone. Ctrl-C stops a reply, and leaves where none is running."""

Play = Annotated[bool, typer.Option("--play", help="Play replies on this machine's sound device.")]


@grouped
def chat(
    *,
    play: Play = False,
    device: Device = "",
    output: Output = "",
    options: WrittenOptions,
    as_json: AsJson = False,
    url: StreamUrl = DEFAULT_URL,
    model: Model = "",
) -> None:
    """Talk with the model, turn by turn; /help lists what else can be typed. Ctrl-C stops a reply, again leaves."""
    if output == "-":
        raise typer.BadParameter("chat writes to a file; - is for say, ask and play", param_hint="-o")
    options.check_output(output)
    if play and options.text_only:
        raise typer.BadParameter("not with --text-only, whose replies have no speech", param_hint="--play")
    if device and not play:
        raise typer.BadParameter(f"{device!r}: only with --play", param_hint="--device")
    conversation = Conversation(system=options.system, **options.request_fields())
    with errors(url, as_json=as_json), ExitStack() as stack:
        client = stack.enter_context(OmniClient(url, model=model or MODEL))
        check_voice(client, options.voice or "")
        writer = stack.enter_context(wav_file(output))
        player = stack.enter_context(Player(device)) if play else None
        Chat(client, conversation, url, writer, player, as_json=as_json).run()


def check_voice(client: OmniClient, name: str) -> None:
    """Refuse a voice that the server does not have, where it tells its voices; an empty name is its own.

    Raises:
        BadRequest: the voice is none of them.
        OmniClientError: the server could not be asked.
    """
    told = {voice for model in (client.models() if name else ()) for voice in model.voices or ()}
    if told and name not in told:
        raise BadRequest(f"voice {name!r} is not one of: {', '.join(sorted(told))}")


class Chat:
    """One conversation at the terminal.

    Args:
        client: where replies come from.
        conversation: keeps the turns; may have some already.
        url: named in errors.
        writer: takes the speech of all replies, one after another.
        player: plays them.
        as_json: one JSON object a turn on stdout, and nothing else.
    """

    def __init__(
        self,
        client: OmniClient,
        conversation: Conversation,
        url: str,
        writer: WavWriter | None = None,
        player: Player | None = None,
        *,
        as_json: bool = False,
    ) -> None:
        self._client = client
        self._conversation = conversation
        self._url = url
        self._writer = writer
        self._player = player
        self._as_json = as_json
        self._media: list[Media] = []
        self._commands: dict[str, Callable[[str], None]] = {
            "image": self._show,
            "audio": self._show,
            "video": self._show,
            "voice": self._voice,
            "reset": self._reset,
            "help": lambda _argument: self._say(HELP),
        }

    def run(self) -> None:
        """Read lines until /quit or the end of stdin.

        Raises:
            typer.Exit: with 130 after Ctrl-C while no reply ran; with 1 at the end when stdin is no terminal and a
                turn or a command failed.
        """
        failed = False
        for line in self._lines():
            if line == "/quit":
                break
            try:
                self._handle_line(line)
            except OmniClientError as error:
                failed = True
                report(error, self._url, as_json=self._as_json)
        if failed and not sys.stdin.isatty():
            raise typer.Exit(1)

    def _lines(self) -> Iterator[str]:
        asks = sys.stdin.isatty() and not self._as_json
        if asks:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (`input` then edits and remembers lines)
            self._say("/help lists what else can be typed")
        while True:
            try:
                yield input("> " if asks else "").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                raise typer.Exit(INTERRUPTED) from None

    def _handle_line(self, line: str) -> None:
        if line.startswith("/"):
            name, _, argument = line[1:].partition(" ")
            command = self._commands.get(name)
            if command is None:
                raise BadRequest(f"/{name} is none of /{', /'.join([*self._commands, 'quit'])}")
            command(argument.strip())
        elif line or self._media:
            self._talk(line)

    def _talk(self, text: str) -> None:
        turn = self._conversation.ask(self._client, text, self._media)
        screen = Screen(text_to_stderr=False, silent=self._as_json)
        size = sum(len(medium.data) for medium in self._media)
        self._media = []  # also where the turn fails: a file that is refused once is refused again
        with turn, screen.open(), Interrupts() as interrupts:
            interrupts.stop = partial(self._stop, turn)
            screen.sending(size)
            self._receive(turn, screen, interrupts)
        if interrupts.pressed and self._player is not None:
            self._player.stop()  # what came in while it was being stopped
        self._finish(turn, stopped=interrupts.pressed)

    def _stop(self, turn: SpokenTurn) -> None:
        turn.close(None if self._player is None else self._player.stop())

    def _receive(self, turn: SpokenTurn, screen: Screen, interrupts: Interrupts) -> None:
        for delta in turn:
            if isinstance(delta, AudioDelta):
                for sink in (self._writer, self._player):
                    if sink is not None:
                        sink.write(delta.samples)
            screen.show(delta, turn.timings())
            if interrupts.pressed:
                return
        if self._player is not None:
            self._player.drain()
            if not interrupts.pressed:
                self._player.stop()  # the next reply counts what is heard anew

    def _finish(self, turn: SpokenTurn, *, stopped: bool) -> None:
        if self._as_json:
            heard = self._conversation.turns[-1].reply
            print_json(summary(turn.reply(), "") | {"heard": heard, "stopped": stopped})
        else:
            self._say(("stopped · " if stopped else "") + last_line(turn.timings()))

    def _show(self, path: str) -> None:
        medium = load_media(path)
        self._media.append(medium)
        self._say(f"{medium.kind} {path} goes with the next message")

    def _voice(self, name: str) -> None:
        check_voice(self._client, name)
        self._conversation.options["voice"] = name or None
        self._say(f"voice {name}" if name else "the server's own voice")

    def _reset(self, _argument: str) -> None:
        self._media = []
        self._conversation.reset()
        self._say("forgotten")

    def _say(self, text: str) -> None:
        typer.echo(text, err=True)
