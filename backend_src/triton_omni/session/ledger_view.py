# SPDX-License-Identifier: Apache-2.0
"""One server's session ledger as it stands at a moment: what each stage says of itself, and every open session.

The doctor reads a snapshot of the table's file, so that it can neither write to the table nor keep it alive. The
supervisor and the unary model write their fields through `StageBoard`, which starts and ends no process.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

from triton_omni.core.errors import StageName
from triton_omni.session import ledger_table as table
from triton_omni.session.ledger_table import STAGES, Table
from triton_omni.session.server_folder import is_running, table_path


@dataclass(frozen=True)
class StageView:
    """One stage's block of the ledger."""

    pid: int
    """Process that serves it, or last did; 0 = none, or it has left in order."""
    runs: bool
    """True if the process exists."""
    epoch: int
    """Number of times the stage was loaded."""
    silent_s: float
    """Seconds since its loop last turned."""
    lost: bool
    """It died, and has not been loaded again."""
    broken: bool
    """Its engine failed, and it has not been loaded again."""


@dataclass(frozen=True)
class UnaryView:
    """The unary model's block of the ledger."""

    pid: int
    """Process that serves it, or last did; 0 = none, or it has left in order."""
    runs: bool
    """True if the process exists."""
    open_requests: int
    """Requests that only this process can end."""


@dataclass(frozen=True)
class SessionView:
    """A session that the thinker has not ended."""

    name: str
    """`s<slot>g<generation>`, as in logs."""
    age_s: float
    overdue_s: float
    """Seconds since its deadline; negative before it."""
    closed: frozenset[StageName]
    """Stages that say they have finished with it."""


@dataclass(frozen=True)
class LedgerView:
    """A whole ledger at one moment."""

    stages: dict[StageName, StageView]
    unary: UnaryView
    sessions: tuple[SessionView, ...]

    def held_by(self, stage: StageName) -> frozenset[str]:
        """Names of the open sessions that `stage` has not finished with; it may not have heard of all."""
        return frozenset(session.name for session in self.sessions if stage not in session.closed)


def read_ledger(path: Path) -> LedgerView:
    """The ledger in this file, now.

    Raises:
        OSError: there is none.
        LedgerError: the file is no table of this layout, or not this user's alone.
    """
    ledger, now_ns = Table(path, snapshot=True), time.monotonic_ns()
    pid = ledger.word(table.PID, "unary")
    return LedgerView(
        stages={stage: _stage(ledger, stage) for stage in STAGES},
        unary=UnaryView(pid, is_running(pid), ledger.word(table.OPEN_REQUESTS, "unary")),
        sessions=tuple(_session(ledger, slot, now_ns) for slot in range(table.CAPACITY) if ledger.is_held(slot)),
    )


def _stage(ledger: Table, stage: StageName) -> StageView:
    pid, epoch = ledger.word(table.PID, stage), ledger.word(table.EPOCH, stage)
    return StageView(
        pid=pid,
        runs=is_running(pid),
        epoch=epoch,
        silent_s=ledger.silent_for(stage),
        lost=0 < epoch <= ledger.word(table.LOST, stage),
        broken=ledger.is_broken(stage),
    )


def _session(ledger: Table, slot: int, now_ns: int) -> SessionView:
    deadline_ns = ledger.word(table.DEADLINE, slot=slot)
    return SessionView(
        name=f"s{slot}g{ledger.word(table.GENERATION, slot=slot)}",
        age_s=(now_ns - ledger.word(table.OPENED, slot=slot)) / 1e9,
        overdue_s=(now_ns - deadline_ns) / 1e9 if deadline_ns else float("-inf"),
        closed=frozenset(stage for stage in STAGES if ledger.is_closed(slot, stage)),
    )


# --- the supervisor's view --------------------------------------------------------------------------------------------


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
