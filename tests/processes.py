# SPDX-License-Identifier: Apache-2.0
"""Whether a process that a test knows by its number still runs, and who is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

IN_TIME_S = 20.0

UNMEASURED = {"COVERAGE_PROCESS_CONFIG": "", "COVERAGE_PROCESS_START": ""}
"""Environment of a process that coverage leaves alone: one that imports torch or vLLM starts in a third of the time."""


def is_running(pid: int) -> bool:
    """Whether it does; one that has ended and was not yet collected by its parent does not."""
    try:
        # The command's name, in brackets, may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    """Processes that a process of one thread has started and not yet collected, in the order of their starts."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def family(root: int) -> list[int]:
    """A process and all that it has started."""
    found = [root]
    for task in Path(f"/proc/{root}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += family(int(child))
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    """Poll until it holds, for `IN_TIME_S` at most."""
    deadline = time.monotonic() + IN_TIME_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
