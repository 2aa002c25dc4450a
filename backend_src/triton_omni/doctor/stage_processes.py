# SPDX-License-Identifier: Apache-2.0
"""Servers of this user and their stages' processes, also before a ledger tells of them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from triton_omni.core.errors import StageName
from triton_omni.session.ledger_table import STAGES
from triton_omni.supervisor.leftovers import OWN_REGIONS_OPTION

_SERVER = "tritonserver"


def server_processes() -> Iterator[int]:
    """Process ids of this user's tritonservers that a supervisor of this project has started."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile
            is_own = process.name() == _SERVER and process.uids().real == os.getuid()
            if is_own and any(OWN_REGIONS_OPTION in argument for argument in process.cmdline()):
                yield process.pid


def stage_processes(server: int) -> dict[StageName, int]:
    """Process ids of a server's stages by stage, the newest of each; those that only begin to load among them."""
    found: dict[StageName, int] = {}
    with contextlib.suppress(psutil.NoSuchProcess):  # the server ended meanwhile
        for child in psutil.Process(server).children():
            if (stage := _stage_of(child)) is not None:
                found[stage] = max(child.pid, found.get(stage, 0))
    return found


def _stage_of(process: psutil.Process) -> StageName | None:
    """Return the stage whose `…/STAGE/1/model.py` a process runs; None for any other process, or one that ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        model = Path(*process.cmdline()[1:2])
        return next((stage for stage in STAGES if model.parts[-3:] == (stage, "1", "model.py")), None)
    return None


def running_for(pid: int) -> float:
    """Seconds since a process was started.

    Raises:
        psutil.NoSuchProcess: there is none.
    """
    return time.time() - psutil.Process(pid).create_time()
