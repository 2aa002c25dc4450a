# SPDX-License-Identifier: Apache-2.0
"""Output of the commands: a reply as it comes, its WAV file, its summary, and errors as one sentence.

Text goes to stdout, everything about it to stderr. With `--json` stdout is objects alone, one a line.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any, BinaryIO

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from .audio import WavWriter
from .errors import BadRequest, ConnectionFailed, OmniClientError, Overloaded
from .messages import Delta, TextDelta
from .printable import one_line, printable
from .reply import Reply, Timings

FAILED, USAGE = 1, 2
EXIT_CODES = (
    "Exit codes: 0 done, 1 the server refused or the run failed, 2 wrong usage (an option, or a file that you named), "
    "130 interrupted (what was received is kept)."
)
HOW_TO_START = "./build.sh serve starts a server, triton-omni ready --wait 60 waits for one that loads"
LARGE_UPLOAD = 1 << 20
"""Bytes of media from which their sending is shown."""


class Screen:
    """Where a reply is shown: text to `out` as it comes, a progress line to `err` when that is a terminal.

    On one terminal, text and progress are drawn together and the text is printed at the end. A redrawn line and a
    growing line cannot share a place. A terminal gets the text `printable`, a file or pipe as it is.
    """

    def __init__(self, *, text_to_stderr: bool, silent: bool) -> None:
        self._out = sys.stderr if text_to_stderr else sys.stdout
        self._silent = silent
        err = Console(stderr=True)
        self._live = Live(console=err, transient=True, refresh_per_second=8) if err.is_terminal else None
        self._late = self._live is not None and self._out.isatty()
        self._text = ""

    def sending(self, total: int) -> None:
        """Show that a request with `total` bytes of media is on its way, where that can take a while."""
        if self._live is not None and total >= LARGE_UPLOAD:
            self._live.update(Spinner("dots", Text(f"sending {_megabytes(total)}", style="dim")))

    def sent(self, done: int, total: int) -> None:
        """Show how much of a request has left."""
        if self._live is not None and total >= LARGE_UPLOAD:
            row = Table.grid(padding=(0, 1))
            row.add_row(
                Text(f"sent {_megabytes(done)} of {_megabytes(total)}", style="dim"), ProgressBar(total, done, 30)
            )
            self._live.update(row)

    def show(self, delta: Delta, timings: Timings) -> None:
        """Show one more piece of the reply."""
        if isinstance(delta, TextDelta):
            self._text += delta.text
            if not self._late:
                self._write(delta.text)
        if self._live is not None:
            progress = Text(f"audio {timings.audio:.1f} s", style="dim")
            shown: RenderableType = (
                Group(Text(printable(self._text)), progress) if self._late and not self._silent else progress
            )
            self._live.update(shown)

    def _write(self, text: str) -> None:
        if not self._silent:
            self._out.write(printable(text) if self._out.isatty() else text)
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


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


class NotWritten(OmniClientError):
    """A file took no more: the disk is full, say."""

    code = "not_written"


class _SpeechFile(io.FileIO):
    """A file without a buffer: the header of what was written can still be set where no more can be."""

    def write(self, data: Any, /) -> int:
        left = memoryview(data)
        try:
            while left:
                left = left[super().write(left) :]
        except OSError as error:
            raise NotWritten(f"{self.name}: cannot be written: {error.strerror}") from error
        return len(memoryview(data))


@contextmanager
def wav_file(output: str) -> Iterator[WavWriter | None]:
    """A writer of the WAV file of this name; `-` is stdout, an empty name is none.

    Raises:
        typer.BadParameter: the file cannot be written.
        NotWritten: it cannot be written any more; what was written before is a whole WAV file.
    """
    if not output:
        yield None
        return
    with ExitStack() as stack:
        file: BinaryIO = sys.stdout.buffer if output == "-" else stack.enter_context(_open(output))
        yield stack.enter_context(_writer(file))


def _open(output: str) -> BinaryIO:
    try:
        return _SpeechFile(output, "wb")
    except OSError as error:
        raise typer.BadParameter(f"{output}: cannot be written: {error.strerror}", param_hint="-o") from error


def _writer(file: BinaryIO) -> WavWriter:
    try:
        return WavWriter(file)
    except NotWritten as error:
        raise typer.BadParameter(error.message, param_hint="-o") from error


def print_json(value: object) -> None:
    """One JSON object on one line of stdout."""
    typer.echo(printable(json.dumps(value, ensure_ascii=False)))


@contextmanager
def usage_errors(option: str | None = None) -> Iterator[None]:
    """Turns what this client refuses by itself, before it asks anybody, into a refusal of wrong usage: exit code 2."""
    try:
        yield
    except BadRequest as error:
        raise typer.BadParameter(error.message, param_hint=option) from error


@contextmanager
def errors(url: str, *, as_json: bool = False) -> Iterator[None]:
    """Turns the client's errors into one sentence on stderr and exit code 1; with `--json` also into an object."""
    try:
        yield
    except OmniClientError as error:
        report(error, url, as_json=as_json)
        raise typer.Exit(FAILED) from error


def report(error: OmniClientError, url: str, *, as_json: bool = False) -> None:
    """Say what went wrong: a sentence on stderr, with `--json` also `{"error": …}` on stdout."""
    if as_json:
        fields = ("code", "message", "stage", "retry_after_ms")
        print_json({"error": {name: getattr(error, name) for name in fields}})
    typer.echo(f"error: {one_line(_sentence(error, url))}", err=True)


def _sentence(error: OmniClientError, url: str) -> str:
    where = f" (in the {error.stage})" if error.stage else ""
    if isinstance(error, ConnectionFailed):
        return f"no connection to {url}: {with_hint(error.message)}"
    if isinstance(error, Overloaded) and error.retry_after_ms is not None:
        return f"{error.code}: {error.message}{where}; try again in {error.retry_after_ms / 1000:g} s"
    return f"{error.code}: {error.message}{where}"


def with_hint(reason: str) -> str:
    """Why there is no connection, and how to get one where nothing listens."""
    return f"{reason}; {HOW_TO_START}" if "Connection refused" in reason else reason


def last_line(timings: Timings) -> str:
    """The times of a reply in one line."""
    parts = []
    if timings.first_text is not None:
        parts.append(f"first text {timings.first_text:.2f} s")
    if timings.first_audio is not None:
        parts.append(f"first audio {timings.first_audio:.2f} s")
    parts.append(f"audio {timings.audio:.1f} s")
    if timings.real_time_factor is not None:
        parts.append(f"real-time factor {timings.real_time_factor:.2f}")
    return " · ".join(parts)


def summary(reply: Reply, output: str) -> dict[str, Any]:
    """A reply as a JSON object; its speech is in the file `output` or nowhere."""
    timings = asdict(reply.timings) | {"real_time_factor": reply.timings.real_time_factor}
    return {
        "text": reply.text,
        "output": output or None,
        "samples": len(reply.audio),
        "timings": timings,
        "info": None if reply.info is None else dict(reply.info.raw),
    }
