# SPDX-License-Identifier: Apache-2.0
"""Takes the output of tritonserver to a file or to standard error, and keeps its end to say why a server died.

It knows the form of Triton's log lines and of crashes, and nothing of the models. Lines that repeat are counted instead
of written: a caller can make tritonserver write the same one 90,000 times a second.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from triton_omni.core.arguments import say
from triton_omni.core.logs import LastingFailure
from triton_omni.supervisor.machine import ServerError
from triton_omni.supervisor.readiness import MISSING_BACKEND

# --- repeated lines ---------------------------------------------------------------------------------------------------


PERIOD_S = 10.0
"""Seconds in which a line is written `WRITTEN` times at most."""
WRITTEN = 20
"""More than the frames that the tracebacks of one fault have in common."""
_MOST_LINES = 1024


class Repeats:
    """Lets each line pass `WRITTEN` times in `PERIOD_S`; the others are counted, and told in one line.

    Args:
        clock: seconds, from anywhere.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[float, int]] = {}
        """By line, the start of its period and its count in it, the oldest period first."""

    def pass_on(self, line: str) -> Iterator[str]:
        """Return the text to write for this line, line ends included."""
        now = self._clock()
        yield from self._end_periods(now)
        begin, count = self._seen.get(line, (now, 0))
        if count < WRITTEN:
            yield line
        if count or len(self._seen) < _MOST_LINES:
            self._seen[line] = (begin, count + 1)

    def rest(self) -> Iterator[str]:
        """Return the text to write after the last line."""
        yield from self._end_periods(float("inf"))

    def _end_periods(self, now: float) -> Iterator[str]:
        while self._seen:
            line, (begin, count) = next(iter(self._seen.items()))
            if now - begin < PERIOD_S:
                return
            del self._seen[line]
            if count > WRITTEN:
                yield f"{line.rstrip()} ({count - WRITTEN} times more in {PERIOD_S:.0f} s)\n"


# --- the log ----------------------------------------------------------------------------------------------------------


_KEPT_LINES = 400
# Lines at a log's end that are searched for a crash if no model failed to load: the server survived earlier ones.
_LAST_LINES = 60
# `E1121 02:22:03.042 42 model_lifecycle.cc:654] "failed to load 'thinker' version 1: Internal: SettingsError: …"`:
# a message of several lines is quoted, its line ends escaped; the first line has the reason.
_FAILED_MODEL = re.compile(r"failed to load '(?P<model>[^']+)' version \d+: (?P<reason>.*?)(?:\\n|\"?$)")
_ERROR = re.compile(r"^(?:E\d{4} .*?\] \"?|error: )(?P<reason>.*?)(?:\\n.*|\"?)$")
# Lines that report a failure without its cause.
_GENERIC = re.compile(
    r"Stub process .* is not healthy|See root cause above|failed to load all models|has no loaded version"
    r"|Exit timeout expired"
)
_CXX_EXCEPTION = re.compile(r"terminate called after throwing an instance of '(?P<type>.+)'")
_CXX_WHAT = re.compile(r"\s*what\(\):\s*(?P<what>.*\S)")
_HARMLESS = re.compile(rf"{MISSING_BACKEND}|CudaDriverHelper has not been initialized|unable to create stream for")
"""Part of lines about the model that cannot load on purpose, and of lines on every machine without a GPU."""
_KILLED = "it was killed (SIGKILL), as by a system that has no memory left"
_TOLD = {signal.SIGABRT, signal.SIGSEGV}
"""Signals that the log explains: Triton writes a line for these two before it ends."""
_TRACEBACK = "Traceback (most recent call last):"
# Signals of a fault, without the two that stop a server in order.
_SIGNAL = re.compile(r"Fatal Python error: .+|Signal \((?!2\)|15\))\d+\) received\.?|Segmentation fault.*")


def find_reason(lines: Sequence[str]) -> str:
    """Return in one sentence why a server with this output ended.

    It names the first model that failed to load and its message, else the crash at the end, else the last error line.
    A crash (a C++ exception, a Python traceback, a fatal signal) tells more than Triton's generic lines after it.
    """
    lines = [line for line in lines if not _HARMLESS.search(line)]
    for number, line in enumerate(lines):
        if found := _FAILED_MODEL.search(line):
            reason = found["reason"].strip()
            if _GENERIC.search(reason):
                reason = " after ".join([reason.rstrip("."), *_crashes(lines[:number])[-1:]])
            return f"model {found['model']} cannot be loaded: {reason}"
    errors = [found["reason"] for line in lines if (found := _ERROR.match(line))]
    told = [error for error in errors if not _GENERIC.search(error)]
    return (_crashes(lines[-_LAST_LINES:])[-1:] or told[-1:] or errors[-1:] or [*lines[-1:], "it said nothing"])[0]


def _crashes(lines: Sequence[str]) -> list[str]:
    """Return one line for each crash, in order; bare signals first, then exceptions, which say more."""
    signals, exceptions, in_traceback = [], [], False
    for number, line in enumerate(lines):
        if found := _CXX_EXCEPTION.search(line):
            what = next((what["what"] for after in lines[number + 1 :] if (what := _CXX_WHAT.match(after))), "")
            exceptions.append(f"{found['type']}: {what}" if what else found["type"])
        elif found := _SIGNAL.match(line):
            signals.append(found[0])
        elif in_traceback and line and not line[0].isspace():
            exceptions.append(line)
        in_traceback = line.endswith(_TRACEBACK) or (in_traceback and line[:1].isspace())
    return signals + exceptions


def _silent_end(exit_code: int) -> str | None:
    """Return the signal that ended a process without a line in its log; None = none did."""
    if exit_code == 128 + signal.SIGKILL:
        return _KILLED
    number = exit_code - 128
    if number not in set(signal.Signals) - _TOLD:
        return None
    return f"it was ended by {signal.Signals(number).name} ({signal.strsignal(number)})"


class ServerLog:
    """One server's output; `follow` each of its processes in turn, and `close` it after the last has ended."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._tail: deque[str] = deque(maxlen=_KEPT_LINES)
        self._pump: threading.Thread | None = None
        self._sink: IO[str] | None = None
        self._failure = LastingFailure()

    @property
    def hint(self) -> str:
        """Return the end of a sentence that names where to read more."""
        return f" (log: {self.path})" if self.path is not None else ""

    def open(self) -> None:
        """Create the file; call this before there is output to lose.

        Raises:
            ServerError: it cannot be created, for example without its folder, or is the log of a running server.
        """
        if self.path is not None:
            try:
                if not self.path.parent.exists():
                    raise ServerError(f"the log {self.path} cannot be written: its folder does not exist")
                self._sink = _own(self.path)
            except OSError as error:
                raise ServerError(f"the log {self.path} cannot be written ({error.strerror})") from error

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """Copy the process's standard output from now on, on a thread; `settle` the previous process first."""
        if process.stdout is None:
            raise ValueError("the process was started without a pipe for its output")
        if self._sink is None:
            self.open()
        self._tail.clear()
        self._pump = threading.Thread(target=self._copy, args=(process.stdout,), name="server-log", daemon=True)
        self._pump.start()

    def settle(self, timeout_s: float = 5.0) -> None:
        """Wait until all output of a process that has ended is copied."""
        if self._pump is not None:
            self._pump.join(timeout_s)

    def close(self) -> None:
        """Close the file, once all output is copied."""
        self.settle()
        if self._sink is not None:
            # `close` writes once more what could not be written.
            with suppress(OSError):
                self._sink.close()

    def reason(self, exit_code: int | None = None) -> str:
        """Return in one sentence why the server died: a signal that left no line, or what `find_reason` finds."""
        return _silent_end(exit_code or 0) or find_reason(list(self._tail))

    def _copy(self, source: IO[bytes]) -> None:
        repeats = Repeats()
        with source:
            for raw in source:
                self._keep(repeats.pass_on(raw.decode("utf-8", errors="replace")))
        self._keep(repeats.rest())

    def _keep(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._tail.append(line.rstrip("\n"))
            self._write(self._sink or sys.stderr, line)

    def _write(self, sink: IO[str], line: str) -> None:
        """Write a line, or drop it if that fails: output that nobody reads would block the server."""
        try:
            sink.write(line)
            sink.flush()
        except OSError as error:
            if self._failure.begins(str(error.strerror)):
                what = f"the log {self.path or 'on standard error'} cannot be written ({error.strerror})"
                say(f"{what}: lines are lost, the server goes on")
        else:
            if self._failure.ends():
                say(f"the log {self.path or 'on standard error'} is written again")


def _own(path: Path) -> IO[str]:
    """Open a server's log, emptied and locked, so that a second server cannot empty it."""
    sink = os.fdopen(_open_own(path), "a", encoding="utf-8")
    if path.is_file():
        try:
            fcntl.flock(sink, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            sink.close()
            raise ServerError(f"the log {path} is that of a running server: choose another with --log-file") from error
        except OSError:
            # A file system without locks.
            pass
        sink.truncate(0)
    return sink


def _open_own(path: Path) -> int:
    """Return a descriptor of a log. In a folder open to all, another user may have made it, even as a link or a pipe.

    Raises:
        ServerError: another user made it, or the file has a second name.
        OSError: it cannot be opened.
    """
    trusted = (0, os.getuid())
    is_own_link = path.is_symlink() and path.lstat().st_uid in trusted
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    if is_own_link:
        return os.open(path, flags, 0o666)
    # Do not follow a link, and do not wait for a reader of a pipe.
    opened = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    os.set_blocking(opened, True)
    found = os.fstat(opened)
    if found.st_uid in trusted and (found.st_nlink == 1 or not stat.S_ISREG(found.st_mode)):
        return opened
    os.close(opened)
    raise ServerError(
        f"the log {path} belongs to user {found.st_uid} and has {found.st_nlink} names; this server needs one of its "
        "own: remove it, or choose another with --log-file"
    )
