# SPDX-License-Identifier: Apache-2.0
"""Runs calls in processes that are killed at a limit of time or memory, or when nobody wants the result.

Knows no media. The processes run `fork_server`. The fork server of `multiprocessing` does not serve: its folder of
sockets outlives a killed process, and its processes end at the first signal of a stop.

Large arrays of arguments and results lie in memory that the receiver maps, and are copied once. The memory has no name,
so nothing is left of it when both processes end.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

# --- objects from process to process ----------------------------------------------------------------------------------


_RECEIVER_UNKNOWN = 0
"""The process id that `send_handle` wants on Windows alone."""
_ANSWERS: Final = {
    ("builtins", "RuntimeError"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy.core.numeric", "_frombuffer"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
    ("triton_omni.core.errors", "BadRequest"),
    ("triton_omni.core.errors", "InternalError"),
    ("triton_omni.core.errors", "TooLarge"),
    ("triton_omni.request.media.killable", "OutOfMemory"),
    ("triton_omni.request.media.types", "Audio"),
    ("triton_omni.request.media.types", "image_of"),
    ("triton_omni.request.media.types", "Video"),
}
"""Classes that a decoder's answer may hold; building them has no side effects."""


class UnknownAnswerError(Exception):
    """An answer holds an object of another class than decoders send; the message names it."""


def send_object(link: Connection, thing: object) -> None:
    """Send an object that can be pickled.

    Raises:
        OSError: the other end is closed.
    """
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(thing, protocol=5, buffer_callback=buffers.append)
    pieces = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    with os.fdopen(os.memfd_create("omni-object"), "wb", buffering=0) as file:
        for piece in pieces:
            _write(file, piece)
        link.send_bytes(array("Q", [len(piece) for piece in pieces]))
        send_handle(link, file.fileno(), _RECEIVER_UNKNOWN)


def receive_object(link: Connection) -> Any:
    """Receive the next object of a process that is trusted.

    Raises:
        EOFError: the other end was closed, or its process ended.
    """
    head, *buffers = _receive(link)
    return pickle.loads(head, buffers=buffers)


def receive_answer(link: Connection) -> Any:
    """Receive the answer of a decoder, which a file may have taken over: build only numbers, texts and media.

    Its arrays are mapped, can be written to, and keep the memory for as long as they live.

    Raises:
        EOFError: the other end was closed, or its process ended.
        UnknownAnswerError: it holds anything else.
    """
    head, *buffers = _receive(link)
    try:
        return _Answer(io.BytesIO(head), buffers=buffers).load()
    except pickle.UnpicklingError as error:
        raise UnknownAnswerError(str(error)) from error


class _Answer(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Find only the classes of `_ANSWERS`."""
        if (module, name) not in _ANSWERS:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def _receive(link: Connection) -> Sequence[memoryview]:
    sizes = array("Q", link.recv_bytes())
    handle = _handle(link)
    try:
        mapped = memoryview(mmap.mmap(handle, sum(sizes), access=mmap.ACCESS_COPY))
    finally:
        os.close(handle)
    pieces, end = list[memoryview](), 0
    for size in sizes:
        pieces.append(mapped[end : end + size])
        end += size
    return pieces


def _handle(link: Connection) -> int:
    try:
        return recv_handle(link)
    except RuntimeError as error:  # the end of the stream in the place of a handle
        raise EOFError from error


def _write(file: BinaryIO, piece: memoryview) -> None:
    while piece:
        piece = piece[file.write(piece) :]


# --- calls ------------------------------------------------------------------------------------------------------------


ResultT = TypeVar("ResultT")
IsWanted = Callable[[], bool]

LOOK_S: Final = 0.02
"""Seconds between two checks whether a result is still wanted."""
NUMBER: Final = struct.Struct("i")
"""Number that a fork server writes about a process: its id, then its wait status after it ended."""
_STAY: Final = {signal.SIGTERM, signal.SIGINT}
"""Signals that all processes of a service may get at its stop, while open replies are still finished."""


class Killed(Exception):
    """A call's process ended before its result was there."""


class Unwanted(Killed):
    """Nobody wanted the result any more."""


class OutOfTime(Killed):
    """The call used more seconds of CPU time than it was given."""


class OutOfHeaderTime(Killed):
    """The header of a file took more CPU time than it may (`files.open_file`)."""


class OutOfMemory(Killed):
    """The call needed more memory than its process may have."""


class Crashed(Killed):
    """The process ended by itself; the argument says how."""


class ForkServer:
    """A process that has imported `module` and holds nothing of a request; others are forked from it.

    It ends with this process. Safe to use from many threads.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._lock = threading.Lock()
        self._start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._server.pid

    def process(self, memory_bytes: int) -> KillableProcess:
        """Fork a process that may use `memory_bytes` beyond its first memory."""
        with self._lock:
            try:
                return self._fork(memory_bytes)
            except OSError:  # the server was killed
                self.close()
                self._start()
                return self._fork(memory_bytes)

    def close(self) -> None:
        """End the server; the processes forked from it stay."""
        self._control.close()
        self._server.kill()
        self._server.wait()

    def _start(self) -> None:
        # An embedded interpreter, as in Triton's stub, does not know the program that starts another one.
        python = Path(sys.prefix) / "bin" / "python3"
        self._control, theirs = socket.socketpair()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _STAY)  # which a new process inherits
        try:
            with theirs:
                self._server = subprocess.Popen(
                    [python, "-P", "-m", "triton_omni.request.media.fork_server", self._module, str(theirs.fileno())],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    pass_fds=[theirs.fileno()],
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _fork(self, memory_bytes: int) -> KillableProcess:
        link, theirs = Pipe()
        end, told = os.pipe()
        try:
            try:
                socket.send_fds(self._control, [memory_bytes.to_bytes(8, "little")], [theirs.fileno(), told])
            finally:
                theirs.close()
                os.close(told)
            return KillableProcess(link, end)
        except OSError:
            link.close()
            os.close(end)
            raise


class KillableProcess:
    """One process, which runs one call at a time; made by `ForkServer.process`.

    Args:
        link: to the process.
        end: a pipe on which the fork server writes its process id, and its wait status after it ended.

    Raises:
        ConnectionResetError: the fork server has ended; `link` and `end` stay open.
    """

    def __init__(self, link: Connection, end: int) -> None:
        self._link, self._end = link, end
        if (pid := self._number()) is None:
            raise ConnectionResetError("the fork server has ended")
        self.pid = pid
        """Its process id."""

    @property
    def is_running(self) -> bool:
        """True if it can run another call: neither it nor its fork server has ended."""
        return not self._link.closed and not wait([self._end], 0)

    def run(self, call: Callable[[], ResultT], seconds: float, is_wanted: IsWanted) -> tuple[ResultT, float]:
        """Return the result of `call` and the CPU seconds that it took; both must be picklable.

        Raises:
            Killed: the process has ended and must not be asked again.
            OmniError: raised by the call.
            RuntimeError: the call raised something else; the text has its traceback.
            OSError: this process lacks descriptors or memory; the other one must not be asked again.
        """
        try:
            send_object(self._link, (call, seconds))
            while not wait([self._link], LOOK_S):
                if not is_wanted():
                    raise Unwanted
            outcome, used = receive_answer(self._link)
        except UnknownAnswerError as error:
            raise Crashed(f"it answered {error}") from error
        except (EOFError, ConnectionError) as error:
            raise self._cause() from error
        if isinstance(outcome, Exception):
            raise outcome
        return outcome, used

    def kill(self) -> None:
        """End it by force; a second call does nothing."""
        if not self._link.closed:
            self._close()

    def _close(self) -> int | None:
        """End it; return its wait status, None if the fork server has ended and cannot report it."""
        try:
            if self.is_running:  # else the id may be that of another process by now
                os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it ended in between, and the fork server tells how
        status = self._number()
        self._link.close()
        os.close(self._end)
        return status

    def _cause(self) -> Killed:
        status = self._close()
        code = signal.SIGKILL if status is None else -os.waitstatus_to_exitcode(status)
        if code == signal.SIGXCPU:
            return OutOfTime()
        if code == signal.SIGPROF:
            return OutOfHeaderTime()
        if code == signal.SIGKILL:  # by the kernel, if the memory of the machine or container is used up
            return OutOfMemory()
        return Crashed(signal.Signals(code).name if code > 0 else f"exit status {-code}")

    def _number(self) -> int | None:
        """Return the next number of the fork server; None = it has ended."""
        got = os.read(self._end, NUMBER.size)
        return NUMBER.unpack(got)[0] if got else None
