# SPDX-License-Identifier: Apache-2.0
"""The supervisor's view of the session ledger: the process of each stage, its state, and its death.

The unary model counts as a stage here, though it has no loop and no engine. The supervisor and the unary model write
their fields through the board; it starts and ends no process.
"""

from __future__ import annotations

import threading
import time

from triton_omni.core.errors import StageName
from triton_omni.session import ledger_table as table
from triton_omni.session.server_folder import is_running, table_path


class StageBoard(table.Table):
    """The table of one server.

    Args:
        name: of the server's folder (`server_folder.ledger_name`).

    Raises:
        FileNotFoundError: no stage of that server was ever loaded.
        LedgerError: the file is no table of this layout, or not this user's alone.
    """

    def __init__(self, name: str) -> None:
        super().__init__(table_path(name))
        self._lock = threading.Lock()

    def holds_overdue(self, stage: StageName) -> bool:
        """True if it has not finished with an open session whose deadline has passed."""
        return any(self._is_overdue(slot, stage) for slot in range(table.CAPACITY))

    def leaves_open(self, model: StageName) -> bool:
        """True if its dead process had requests that no other process can end: those of the unary model, and all
        sessions once no stage is left.
        """
        if model == "unary":
            return self.word(table.OPEN_REQUESTS, model) > 0
        return not any(is_running(self.word(table.PID, other)) for other in table.STAGES)

    def mark_lost(self, stage: StageName) -> None:
        """`stage` has died: the others end what they share with it, and begin nothing until it is loaded again."""
        self.set_word(table.LOST, self.word(table.EPOCH, stage), stage)

    def count_fault(self) -> None:
        """Count a failure to start a stage or to change readiness, for the stages' metrics. Called from any thread."""
        with self._lock:
            self.set_word(table.FAULTS, self.word(table.FAULTS) + 1)

    def open_sessions(self) -> int:
        """Sessions that the thinker has not ended, those of dead stages left out."""
        return sum(self.is_held(slot) for slot in range(table.CAPACITY))

    def _is_overdue(self, slot: int, stage: StageName) -> bool:
        passed = 0 < self.word(table.DEADLINE, slot=slot) < time.monotonic_ns()
        return passed and self.is_held(slot) and not self.is_closed(slot, stage)
