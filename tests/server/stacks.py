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

from triton_omni.session.ledger_table import PID
from triton_omni.session.ledger_view import StageBoard
from triton_omni.session.server_folder import ledger_name

if TYPE_CHECKING:
    from server.serving import Served

_SIGNAL = signal.SIGUSR2
_WRITTEN_WITHIN_S = 1.0
_INNERMOST, _LOG_LINES = 8, 15
_FRAME = re.compile(r'File ".*?([^/"]+)", line (\d+) in (\w+)')


def write_on_signal(folder: Path, stage: str) -> None:
    """Have this process append the stacks of its threads to a file each time that it gets the signal."""
    faulthandler.register(_SIGNAL, (folder / f"{stage}.stacks").open("a"))


def doings(server: Served) -> str:
    """What each stage holds, where each of its threads is, and the end of the log."""
    board = StageBoard(ledger_name(server.supervisor.pid))
    try:
        pids = {stage: board.word(PID, stage) for stage in ("thinker", "talker", "token2wav")}
    finally:
        board.close()
    lines = [f"held: {server.held()}"]
    for stage, pid in pids.items():
        lines += [f"{stage}:", *_threads(pid, server.records.folder / f"{stage}.stacks")]
    return "\n".join([*lines, "log:", *server.log().splitlines()[-_LOG_LINES:]])


def _threads(pid: int, path: Path) -> list[str]:
    """One line a stack, the innermost call first; threads that stand at the same place share one."""
    written = path.stat().st_size
    os.kill(pid, _SIGNAL)
    time.sleep(_WRITTEN_WITHIN_S)
    threads = re.split(r"(?:Current thread|Thread) 0x", path.read_text()[written:])[1:]
    stacks = Counter(" < ".join(map(":".join, _FRAME.findall(thread)[:_INNERMOST])) for thread in threads)
    return [f"{count} x {stack or 'in no Python code'}" for stack, count in stacks.items()]
