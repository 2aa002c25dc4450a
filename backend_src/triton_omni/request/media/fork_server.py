# SPDX-License-Identifier: Apache-2.0
"""`python -m triton_omni.request.media.fork_server MODULE SOCKET`: imports a module, then forks a process for each
message.

A message is a memory limit in bytes, beyond the process's first memory, and two descriptors. One is the link over which
the process gets calls; the other is the pipe of `KillableProcess`.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import math
import os
import resource
import select
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from triton_omni.core.errors import OmniError
from triton_omni.request.media.killable import NUMBER, OutOfMemory, receive_object, send_object


def main(module: str, descriptor: int) -> None:
    """Serve until the other end of the socket `descriptor` is closed."""
    importlib.import_module(module)
    # No signal tells of ended processes: one that came just before a wait would be seen after it. And no epoll waits,
    # since forked processes would share it.
    with socket.socket(fileno=descriptor) as control, selectors.PollSelector() as waits:
        waits.register(control, selectors.EVENT_READ)
        while True:
            for ready, _ in waits.select():
                if ready.data is not None:
                    waits.unregister(ready.fd)
                    _report_end(ready.fd, ready.data)
                    continue
                memory, descriptors, *_ = socket.recv_fds(control, 8, 2)
                if not descriptors:
                    return
                _fork(waits, descriptors, int.from_bytes(memory, "little"))


class _Forked(NamedTuple):
    pid: int
    end: int
    """The pipe on which its owner learns how it ended."""


def _fork(waits: selectors.PollSelector, descriptors: list[int], memory_bytes: int) -> None:
    """Fork a process and wait for its end, too."""
    link, end = descriptors
    if pid := os.fork():
        os.close(link)
        waits.register(os.pidfd_open(pid), selectors.EVENT_READ, _Forked(pid, end))
        os.write(end, NUMBER.pack(pid))
        return
    for other in waits.get_map().values():
        os.close(other.fd)
        if other.data is not None:
            os.close(other.data.end)
    os.close(end)
    try:
        _serve(Connection(link), memory_bytes)
    except Exception:  # noqa: BLE001 - the log's reader learns of it, the owner by the end of the link
        traceback.print_exc()
    finally:
        os._exit(1)


def _report_end(handle: int, process: _Forked) -> None:
    """Write the exit status of an ended process to its owner."""
    os.close(handle)
    _, status = os.waitpid(process.pid, 0)
    with contextlib.suppress(BrokenPipeError):  # the owner has ended, as this process does next
        os.write(process.end, NUMBER.pack(status))
    os.close(process.end)


def _serve(link: Connection, memory_bytes: int) -> None:
    """Serve calls until the owner closes the link or ends."""
    threading.Thread(target=_end_with_owner, args=(link.fileno(),), name="owner-watch", daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = _private_bytes() + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    while True:
        try:
            call, seconds = receive_object(link)
        except EOFError:
            return
        began = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(began + seconds), resource.RLIM_INFINITY))
        send_object(link, (_outcome(call), time.process_time() - began))


def _end_with_owner(link: int) -> None:
    closed = select.poll()
    closed.register(link, 0)  # the end of the other side is always reported
    closed.poll()
    os._exit(1)


def _private_bytes() -> int:
    """Return the bytes that count against RLIMIT_DATA now."""
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
    """True if it was raised for lack of memory, or from such an error."""
    while error is not None:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        error = error.__cause__ or error.__context__
    return False


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
