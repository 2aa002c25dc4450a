# SPDX-License-Identifier: Apache-2.0
"""Calls in processes of their own, which end by force: at a limit of time or memory, or when nobody wants the result.

Knows no media. The processes are forked from one that has imported what they need, and that holds nothing of a request.
"""

from __future__ import annotations

import errno
import math
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeVar

from triton_omni.errors import OmniError
from triton_omni.media.parcels import UnknownAnswerError, put, take, take_answer

ResultT = TypeVar("ResultT")
IsWanted = Callable[[], bool]

LOOK_S = 0.02
"""How often it is asked whether a result is still wanted."""
_STAY = {signal.SIGTERM, signal.SIGINT}
"""Signals that all processes of a service may get at its stop, which begins with replies being finished."""

_starting = threading.Lock()
"""`multiprocessing` looks after all children at each start of one, which two threads must not do together."""


class Killed(Exception):
    """A call's process ended before its result was there."""


class Unwanted(Killed):
    """Nobody wanted the result any more."""


class OutOfTime(Killed):
    """The call used more seconds of CPU time than it was given."""


class OutOfMemory(Killed):
    """The call needed more memory than its process may have."""


class Crashed(Killed):
    """The process ended by itself; the argument says how."""


def start_server(module: str) -> None:
    """Begin to start the process that all others are forked from; it ends with this one. `module` is imported there."""
    # An interpreter that is embedded, as in Triton's stub, does not know what program would start it.
    multiprocessing.set_executable(str(Path(sys.prefix) / "bin" / "python3"))
    multiprocessing.set_forkserver_preload([module])
    resource_tracker.ensure_running()  # `forkserver` does so as well, and unblocks signals then
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _STAY)  # which a new process inherits
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class KillableProcess:
    """One process, which runs one call at a time.

    Args:
        memory_bytes: that it may have besides what it begins with.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._link, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_serve, args=(theirs, memory_bytes), name="omni-decoder", daemon=True)
        with _starting:
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid or 0

    def run(self, call: Callable[[], ResultT], seconds: float, is_wanted: IsWanted) -> tuple[ResultT, float]:
        """What `call` returns, and the CPU seconds that it took; it and the result must be picklable.

        Raises:
            Killed: the process has ended and must not be asked again.
            OmniError: raised by the call.
            RuntimeError: the call raised something else; the text has its traceback.
        """
        try:
            put(self._link, (call, seconds))
            while not wait([self._link], LOOK_S):
                if not is_wanted():
                    raise Unwanted
            outcome, used = take_answer(self._link)
        except UnknownAnswerError as error:
            raise Crashed(f"it answered {error}") from error
        except (EOFError, OSError) as error:
            raise self._cause() from error
        if isinstance(outcome, Exception):
            raise outcome
        return outcome, used

    def kill(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._join()
        self._link.close()

    def _join(self) -> int:
        with _starting:
            self._process.join()
        return self._process.exitcode or 0

    def _cause(self) -> Killed:
        code = -self._join()
        if code == signal.SIGXCPU:
            return OutOfTime()
        if code == signal.SIGKILL:  # by the kernel, where the machine's memory or a container's is used up
            return OutOfMemory()
        return Crashed(signal.Signals(code).name if code > 0 else f"exit status {-code}")


def _serve(link: Connection, memory_bytes: int) -> None:
    """What the process does: call after call, until its parent closes the link or ends."""
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = _private_bytes() + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    while True:
        try:
            call, seconds = take(link)
        except EOFError:
            return
        began = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(began + seconds), resource.RLIM_INFINITY))
        put(link, (_outcome(call), time.process_time() - began))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _private_bytes() -> int:
    """What counts against RLIMIT_DATA by now."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmData:")[2].split()[0]) << 10


def _outcome(call: Callable[[], object]) -> object:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - the other process raises it again
        if _lacked_memory(error):
            return OutOfMemory()
        if isinstance(error, OmniError):
            return error
        return RuntimeError(traceback.format_exc())


def _lacked_memory(error: BaseException | None) -> bool:
    """Whether it was raised because memory could not be had, or from an error that was."""
    while error is not None:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        error = error.__cause__ or error.__context__
    return False
