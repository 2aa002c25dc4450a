# SPDX-License-Identifier: Apache-2.0
"""Calls in processes of their own, which end by force: at a limit of time or memory, or when nobody wants the result.

Knows no media. `fork_server` is what runs in those processes. `multiprocessing` has a fork server as well; its folder
of sockets outlives a process that is killed, and its processes end at the first signal of a stop.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Final, TypeVar

from triton_omni.request.media.object_pipe import UnknownAnswerError, receive_answer, send_object

ResultT = TypeVar("ResultT")
IsWanted = Callable[[], bool]

LOOK_S: Final = 0.02
"""How often it is asked whether a result is still wanted."""
NUMBER: Final = struct.Struct("i")
"""Number that a fork server writes about a process: its id, then its wait status after it ended."""
_STAY: Final = {signal.SIGTERM, signal.SIGINT}
"""Signals that all processes of a service may get at its stop, which begins with replies being finished."""


class Killed(Exception):
    """A call's process ended before its result was there."""


class Unwanted(Killed):
    """Nobody wanted the result any more."""


class OutOfTime(Killed):
    """The call used more seconds of CPU time than it was given."""


class OutOfHeaderTime(Killed):
    """The header of a file took more CPU time than it may (`opening.open_file`)."""


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
        """Fork a process, which may have so much memory besides what it begins with."""
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
        # An interpreter that is embedded, as in Triton's stub, does not know what program would start it.
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
        """True if it can be asked again: neither it nor its fork server has ended."""
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
        """End it, whatever it does; the second time this does nothing."""
        if not self._link.closed:
            self._close()

    def _close(self) -> int | None:
        """End it; its wait status, None where the fork server has ended and cannot tell."""
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
        if code == signal.SIGKILL:  # by the kernel, where the machine's memory or a container's is used up
            return OutOfMemory()
        return Crashed(signal.Signals(code).name if code > 0 else f"exit status {-code}")

    def _number(self) -> int | None:
        """The next number of the fork server, None where it has ended."""
        got = os.read(self._end, NUMBER.size)
        return NUMBER.unpack(got)[0] if got else None
