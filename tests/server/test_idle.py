# SPDX-License-Identifier: Apache-2.0
"""A server does next to nothing while nobody asks it anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.serving import STAGES, Served
from triton_omni.core.errors import StageName
from triton_omni.session.ledger_table import PID
from triton_omni.session.ledger_view import StageBoard
from triton_omni.session.server_folder import ledger_name


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_has_no_threads_that_wait_for_processes_which_there_are_not(server: Served, stage: StageName) -> None:
    board = StageBoard(ledger_name(server.supervisor.pid))
    threads = [file.read_text().strip() for file in Path(f"/proc/{board.word(PID, stage)}/task").glob("*/comm")]
    board.close()
    assert len(threads) > 3
    assert sum(name.startswith("gloo") for name in threads) <= 1
