# SPDX-License-Identifier: Apache-2.0
"""What a running server's stages do at this moment, for the report of a test that failed."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from triton_omni.session.ledger_table import STAGES

if TYPE_CHECKING:
    from server.serving import Served

_SIGNAL = signal.SIGUSR2
_WRITTEN_WITHIN_S, _LOOK_EVERY_S = 5.0, 0.2
_INNERMOST, _LOG_LINES = 8, 15
_FRAME = re.compile(r'File ".*?([^/"]+)", line (\d+) in (\w+)')


def write_on_signal(folder: Path, stage: str) -> None:
    """Have this process append the stacks of its threads to a file each time that it gets the signal."""
    faulthandler.register(_SIGNAL, (folder / f"{stage}.stacks").open("a"))


def doings(server: Served) -> str:
    """What each stage holds, where each of its threads is, and the end of the log."""
    lines = [f"held: {server.held()}"]
    for stage in STAGES:
        lines += [f"{stage}:", *_threads(server.pid(stage), server.records.folder / f"{stage}.stacks")]
    return "\n".join([*lines, "log:", *server.log().splitlines()[-_LOG_LINES:]])


def _threads(pid: int, path: Path) -> list[str]:
    """One line a stack, the innermost call first; threads that stand at the same place share one."""
    threads = re.split(r"(?:Current thread|Thread) 0x", _written(pid, path))[1:]
    stacks = Counter(" < ".join(map(":".join, _FRAME.findall(thread)[:_INNERMOST])) for thread in threads)
    return [f"{count} x {stack or 'in no Python code'}" for stack, count in stacks.items()]


def _written(pid: int, path: Path) -> str:
    """What the process appends when it gets the signal, until it grows no more; a stopped process appends nothing."""
    begin = before = path.stat().st_size
    deadline = time.monotonic() + _WRITTEN_WITHIN_S
    os.kill(pid, _SIGNAL)
    while time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
        now = path.stat().st_size
        if begin < now == before:
            break
        before = now
    return path.read_text()[begin:]
