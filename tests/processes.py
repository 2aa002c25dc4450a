# SPDX-License-Identifier: Apache-2.0
"""Processes by their numbers: which of them still run. Also the environment of those without coverage."""

from __future__ import annotations

import psutil

UNMEASURED = {"COVERAGE_PROCESS_CONFIG": "", "COVERAGE_PROCESS_START": ""}
"""Environment of a process that coverage leaves alone: one that imports torch or vLLM starts in a third of the time."""


def is_running(pid: int) -> bool:
    """Return True if the process runs; one that has ended without being collected by its parent does not."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def children(pid: int) -> list[int]:
    """Processes that a process of one thread has started and not yet collected, in the order of their starts."""
    return [child.pid for child in psutil.Process(pid).children()]


def family(root: int) -> list[int]:
    """A process and all that it has started."""
    return [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]
