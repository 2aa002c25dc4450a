# SPDX-License-Identifier: Apache-2.0
"""Ends what a supervisor that is killed would leave behind: a process that waits for nothing else.

Nobody else can. tritonserver writes into a pipe that nobody reads any more and ends sooner or later, also in the middle
of replies; its stages then live on, each with its memory of the GPU, since threads of theirs wait for tritonserver with
Python's global lock. A guard's standard input is a pipe whose other end the supervisor has: the kernel closes it,
however the supervisor ends.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from triton_omni.ledger_layout import server_name
from triton_omni.serving.leftovers import end_group_of, remove_shared_memory


@contextmanager
def guarded(leader: int, *, regions: str = "", folder: Path | None = None) -> Iterator[None]:
    """If this process is killed within, end a process group, and remove its shared memory and its folder.

    Args:
        leader: process id of who leads the group.
        regions: with what the names of its regions of shared memory begin; empty = it has none.
        folder: made for it; None = none was.
    """
    given = [server_name(leader), regions, str(folder or "")]
    # A session of its own: what ends the supervisor's group, or comes from its terminal, does not reach the guard.
    with subprocess.Popen(
        [sys.executable, "-m", __name__, *given],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as guard:
        try:
            yield
        finally:
            guard.kill()


def main(arguments: Sequence[str]) -> int:
    """Wait for the supervisor's end, then do what `guarded` says."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Who ends all processes of a service in turn starts with these: the supervisor then stops in order.
        signal.signal(number, signal.SIG_IGN)
    leader, regions, folder = arguments
    sys.stdin.buffer.read()
    print(f"the supervisor is gone: {leader} is ended", file=sys.stderr, flush=True)
    end_group_of(leader)
    if regions:
        remove_shared_memory(regions)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
