# SPDX-License-Identifier: Apache-2.0
"""One reply from a server to the terminal, a WAV file and the loudspeaker: what `say`, `ask` and `play` share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import typer

from .address import is_http
from .audio import WavWriter
from .client import OmniClient, Stream
from .evaluate.plots import write_spectrogram
from .http import HttpClient
from .interrupt import INTERRUPTED, Interrupts
from .messages import MODEL, UNARY_MODEL, AudioDelta, Delta, Request, TextDelta
from .options import check_writable
from .player import Player
from .reply import Reply, ReplyBuilder
from .terminal import Screen, errors, last_line, print_json, summary, wav_file

NOT_KEPT: Final = (
    "the speech was not kept: -o FILE.wav writes it, triton-omni play is heard, --text-only asks for text alone"
)


@dataclass(frozen=True)
class Answer:
    """Where a reply comes from and where it goes."""

    url: str
    model: str
    """Empty is the one that fits the URL."""
    output: str = ""
    """WAV file; `-` is stdout, empty is none."""
    as_json: bool = False
    check: bool = False
    """Ask for none: what could be refused before was refused."""
    spectrogram: str = ""
    """PNG file with a picture of the speech; empty is none."""
    player: Player | None = None

    def __post_init__(self) -> None:
        if self.as_json and self.output == "-":
            raise typer.BadParameter("not - with --json: both want stdout", param_hint="-o")
        if self.output not in ("", "-"):
            check_writable(Path(self.output))
        if self.spectrogram:
            check_writable(Path(self.spectrogram), "--spectrogram")
            if find_spec("matplotlib") is None:
                said = "a spectrogram needs matplotlib: pip install matplotlib"
                raise typer.BadParameter(said, param_hint="--spectrogram")

    def give(self, request: Request) -> None:
        """Ask, show the reply as it comes, and its times or summary at the end.

        Raises:
            typer.BadParameter: the WAV file cannot be written.
            typer.Exit: with 1 where the request was refused or failed, of which what came before is in the WAV file;
                with 130 after Ctrl-C, which cancels the request.
        """
        if self.check:
            return
        with errors(self.url, as_json=self.as_json):
            reply, interrupted = self._run(request)
            if self.spectrogram:
                write_spectrogram(reply.audio, reply.text, Path(self.spectrogram))
        if self.as_json:
            print_json(summary(reply, self.output))
        else:
            for line in (last_line(reply.timings), *self._speech_lines(reply.timings.audio)):
                typer.echo(line, err=True)
        if interrupted:
            raise typer.Exit(INTERRUPTED)

    def _run(self, request: Request) -> tuple[Reply, bool]:
        """The reply, and whether Ctrl-C cut it off."""
        builder = ReplyBuilder()
        screen = Screen(text_to_stderr=self.output == "-", silent=self.as_json)
        interrupted = False
        with ExitStack() as stack:
            writer = stack.enter_context(wav_file(self.output))
            stack.enter_context(screen.open())
            screen.sending(sum(map(len, request.media)))
            interrupts = stack.enter_context(Interrupts())
            deltas = stack.enter_context(_deltas(request, client_of(self.url, self.model), screen))
            if isinstance(deltas, Stream):
                interrupts.stop = partial(self._stop, deltas)
            try:
                for delta in deltas:
                    builder.add(delta)
                    if isinstance(delta, AudioDelta):
                        self._hear(delta, writer)
                    screen.show(delta, builder.timings())
                    if interrupts.pressed:
                        break
                builder.end()
                self._drain(interrupts)
            except KeyboardInterrupt:
                interrupted = True
            builder.end()
        return builder.reply(), interrupted or interrupts.pressed

    def _speech_lines(self, seconds: float) -> Iterator[str]:
        """Where the speech is now, where that is not plain."""
        written = [name for name in (self.output, self.spectrogram) if name not in ("", "-")]
        if written:
            yield f"wrote {' and '.join(written)}"
        elif seconds and not self.output and self.player is None:
            yield NOT_KEPT

    def _hear(self, delta: AudioDelta, writer: WavWriter | None) -> None:
        for sink in (writer, self.player):
            if sink is not None:
                sink.write(delta.samples)

    def _drain(self, interrupts: Interrupts) -> None:
        if self.player is not None and not interrupts.pressed:
            self.player.drain()

    def _stop(self, stream: Stream) -> None:
        stream.close()
        if self.player is not None:
            self.player.stop()


def client_of(url: str, model: str) -> OmniClient | HttpClient:
    """The client that fits the URL: HTTP where it begins so, else gRPC.

    Raises:
        BadRequest: it is neither a URL of HTTP nor an address of gRPC.
    """
    if is_http(url):
        return HttpClient(url, model=model or UNARY_MODEL)
    return OmniClient(url, model=model or MODEL)


@contextmanager
def _deltas(request: Request, client: OmniClient | HttpClient, screen: Screen) -> Iterator[Iterator[Delta]]:
    """The deltas of a reply; leaving before their end cancels the request where the protocol can."""
    if isinstance(client, HttpClient):
        yield _deltas_of(client, request, screen)
    else:
        with client, client.stream(request) as stream:
            yield stream


def _deltas_of(client: HttpClient, request: Request, screen: Screen) -> Iterator[Delta]:
    """The deltas of a reply that comes in one piece; asked for when the first is taken."""
    reply = client.unary(request, screen.sent)
    yield TextDelta(reply.text)
    yield AudioDelta(reply.audio)
    if reply.info is not None:
        yield reply.info
