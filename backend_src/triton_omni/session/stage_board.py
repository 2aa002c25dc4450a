# SPDX-License-Identifier: Apache-2.0
"""The supervisor's view of the session ledger: which process serves each stage, how it does, and that it has died.

The unary model counts as one, though it has no loop and no engine, and shares nothing with the others. The board reads
what they write, writes two words a stage and one for all, and starts and ends nothing.
"""

from __future__ import annotations

import threading
import time

from triton_omni.core.errors import StageName
from triton_omni.session import ledger_layout as layout


class StageBoard:
    """The table of one server.

    Args:
        name: of the table (`ledger_layout.ledger_name`).

    Raises:
        FileNotFoundError: no stage of that server was ever loaded.
        LedgerError: the file is no table of this layout, or not this user's alone.
    """

    def __init__(self, name: str) -> None:
        self._map = layout.map_table(layout.table_path(name))
        self._words = memoryview(self._map).cast("Q")
        self._lock = threading.Lock()

    def close(self) -> None:
        """Unmap the table."""
        self._words.release()
        self._map.close()

    def pid(self, stage: StageName) -> int:
        """The process that serves `stage`, or last did; 0 = none, or it has left in order."""
        return self._words[layout.PIDS[stage]]

    def epoch(self, stage: StageName) -> int:
        """How often `stage` was loaded."""
        return layout.epoch(self._words, stage)

    def epochs(self) -> int:
        """The loads of all stages, for `lost_since`."""
        return layout.pack_epochs(self._words)

    def lost_since(self, epochs: int) -> list[StageName]:
        """Return the stages that died in or after these loads."""
        return layout.lost_of(self._words, epochs)

    def silent_for(self, stage: StageName) -> float:
        """Seconds since its loop last turned."""
        return 0.0 if stage == "unary" else layout.silent_for(self._words, stage)

    def is_broken(self, stage: StageName) -> bool:
        """True if its engine has failed since it was loaded."""
        return stage != "unary" and 0 < self.epoch(stage) == self._words[layout.BLOCKS[stage] + layout.BROKEN]

    def holds_overdue(self, stage: StageName) -> bool:
        """True if it has not finished with an open session whose deadline has passed."""
        return any(self._is_overdue(slot, stage) for slot in range(layout.CAPACITY))

    def leaves_open(self, stage: StageName) -> bool:
        """True if its dead process had requests that no other process can end: those of the unary model, and all
        sessions once no stage is left.
        """
        if stage == "unary":
            return self._words[layout.UNARY_OPEN] > 0
        return not any(layout.is_running(self.pid(other)) for other in layout.STAGES)

    def mark_lost(self, stage: StageName) -> None:
        """`stage` has died: the others end what they share with it, and begin nothing until it is loaded again."""
        self._words[layout.LOSSES[stage]] = self.epoch(stage)

    def hold(self, stage: StageName, held: bool) -> None:
        """Set whether the next process of `stage` waits before it loads (`ledger_layout.wait_while_held`)."""
        self._words[layout.HOLDS[stage]] = held

    def say_unary(self, pid: int, open_requests: int) -> None:
        """Unary model only: which process serves it, 0 = none any more; and how many requests only that one can end."""
        self._words[layout.UNARY_PID], self._words[layout.UNARY_OPEN] = pid, open_requests

    def count_fault(self) -> None:
        """Count a failure to start a stage or to change readiness, for the stages' metrics. Called from any thread."""
        with self._lock:
            self._words[layout.FAULTS] += 1

    def drain(self) -> None:
        """No session begins from here on; the thinker refuses whoever asks."""
        self._words[layout.LEAVING] = layout.DRAINING

    def end_sessions(self) -> None:
        """Those that are open end with an error, and none begins."""
        self._words[layout.LEAVING] = layout.ENDING

    def open_sessions(self) -> int:
        """Sessions that the thinker has not ended, those of dead stages left out."""
        return sum(layout.is_held(self._words, layout.record(slot)) for slot in range(layout.CAPACITY))

    def _is_overdue(self, slot: int, stage: StageName) -> bool:
        at = layout.record(slot)
        passed = 0 < self._words[at + layout.DEADLINE] < time.monotonic_ns()
        return passed and layout.is_held(self._words, at) and not layout.is_closed(self._words, at, stage)
