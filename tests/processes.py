# SPDX-License-Identifier: Apache-2.0
"""Whether a process that a test knows by its number still runs, and who is measured."""

from __future__ import annotations

from pathlib import Path

UNMEASURED = {"COVERAGE_PROCESS_CONFIG": "", "COVERAGE_PROCESS_START": ""}
"""Environment of a process that coverage leaves alone: one that imports torch or vLLM starts in a third of the time."""


def is_running(pid: int) -> bool:
    """Whether it does; one that has ended and was not yet collected by its parent does not."""
    try:
        # The command's name, in brackets, may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
