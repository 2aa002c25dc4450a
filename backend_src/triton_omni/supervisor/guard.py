# SPDX-License-Identifier: Apache-2.0
"""A guard process that ends a server and its stages if their supervisor is killed; it does nothing else.

No other process can do this. Without the guard, tritonserver writes into a pipe that nobody reads, and at some point
ends during replies. Its stages then keep their GPU memory, since their threads wait for tritonserver with the GIL held.
The guard's standard input is a pipe from the supervisor, which the kernel closes however the supervisor ends.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from triton_omni.core.arguments import say
from triton_omni.core.logs import LastingFailure
from triton_omni.session.server_folder import server_name
from triton_omni.supervisor.leftovers import end_group, end_group_of, remove_shared_memory
from triton_omni.supervisor.machine import ServerError


class Guard:
    """If this process is killed before `close`, end a process group, and remove its shared memory and its folders.

    Args:
        leader: process id of the group's leader.
        regions: prefix of the names of its regions of shared memory; empty = it has none.
        folders: temporary folders of the group.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, leader: int, *, regions: str = "", folders: Sequence[Path] = ()) -> None:
        self._command = [sys.executable, "-m", __name__, server_name(leader), regions, *map(str, folders)]
        self._process = self._start()
        self._failure = LastingFailure()

    def renew(self) -> None:
        """Start another process if the guard's has ended, and report that on standard error; may be called often."""
        if self._process.poll() is None:
            return
        self._process.communicate()
        try:
            self._process = self._start()
        except OSError as error:
            report = f"warning: the guard's process is gone, and another cannot be started ({error.strerror})"
            if self._failure.begins(report):
                say(report)
        else:
            say("warning: the guard's process was gone; another was started")
            self._failure.ends()

    def close(self) -> None:
        """Stop guarding the group."""
        self._process.kill()
        self._process.communicate()

    def _start(self) -> subprocess.Popen[bytes]:
        # A session of its own: signals to the supervisor's group or terminal do not reach the guard.
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)


@contextmanager
def guarded_process(
    command: Sequence[str], environment: Mapping[str, str], regions: str, folders: Sequence[Path]
) -> Iterator[tuple[subprocess.Popen[bytes], Guard]]:
    """Start a server in a process group of its own, guarded while the context is open; its output is a pipe.

    Leaving the context does not end the server. A terminal's Ctrl-C reaches the supervisor alone, which then
    stops the server in order and ends the rest of its group. Only the server's user can read its files and memory.

    Raises:
        ServerError: a process cannot be started; none is left.
    """
    with ExitStack() as guarded:
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=0o077,
            )
            with ExitStack() as unguarded:
                unguarded.enter_context(process)
                unguarded.callback(end_group, process)
                guard = Guard(process.pid, regions=regions, folders=folders)
                guarded.callback(guard.close)
                unguarded.pop_all()
        except OSError as error:
            raise ServerError(f"{error.filename or 'a process'} cannot be started: {error.strerror}") from error
        yield process, guard


def main(arguments: Sequence[str]) -> int:
    """Wait for the supervisor's end, then do what `Guard` says."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # A service manager signals all processes of a service; the supervisor then stops the server in order.
        signal.signal(number, signal.SIG_IGN)
    leader, regions, *folders = arguments
    sys.stdin.buffer.read()
    say(f"the supervisor is gone: {leader} is ended")
    end_group_of(leader)
    if regions:
        remove_shared_memory(regions)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
