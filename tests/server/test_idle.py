# SPDX-License-Identifier: Apache-2.0
"""A server does next to nothing while nobody asks it anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.serving import Served
from triton_omni.core.errors import StageName
from triton_omni.session.ledger_table import STAGES


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_has_no_threads_that_wait_for_processes_which_there_are_not(server: Served, stage: StageName) -> None:
    threads = [file.read_text().strip() for file in Path(f"/proc/{server.pid(stage)}/task").glob("*/comm")]
    assert len(threads) > 3
    assert sum(name.startswith("gloo") for name in threads) <= 1
