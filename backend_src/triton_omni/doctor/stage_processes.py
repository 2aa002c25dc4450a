# SPDX-License-Identifier: Apache-2.0
"""Servers of this user and their stages' processes, as /proc has them: also before a ledger tells of them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from triton_omni.core.endpoint import command_line
from triton_omni.core.errors import StageName
from triton_omni.session.ledger_layout import STAGES
from triton_omni.supervisor.leftovers import OWN_REGIONS_OPTION

_SERVER = "tritonserver"
_PROC = Path("/proc")


def server_processes() -> Iterator[int]:
    """Process ids of this user's tritonservers that a supervisor of this project has started."""
    for folder in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile
            if folder.stat().st_uid == os.getuid() and (folder / "comm").read_text().strip() == _SERVER:
                pid = int(folder.name)
                if any(OWN_REGIONS_OPTION in argument for argument in command_line(pid)):
                    yield pid


def stage_processes(server: int) -> dict[StageName, int]:
    """Process ids of a server's stages by stage, the newest of each; those that only begin to load among them."""
    found: dict[StageName, int] = {}
    for file in _PROC.glob(f"{server}/task/[0-9]*/children"):
        with contextlib.suppress(OSError):  # ended meanwhile
            for pid in map(int, file.read_text().split()):
                if (stage := _stage_of(pid)) is not None:
                    found[stage] = max(pid, found.get(stage, 0))
    return found


def _stage_of(pid: int) -> StageName | None:
    """Return the stage whose `…/STAGE/1/model.py` a process runs; a process that has ended has no command line."""
    with contextlib.suppress(OSError):
        model = Path(next(iter(command_line(pid)), ""))
        return next((stage for stage in STAGES if model.parts[-3:] == (stage, "1", "model.py")), None)
    return None


def running_for(pid: int) -> float:
    """Seconds since a process was started.

    Raises:
        OSError: there is none.
    """
    started = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[19]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")
