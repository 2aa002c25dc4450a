# SPDX-License-Identifier: Apache-2.0
"""One server's session ledger as it stands at a moment: what each stage says of itself, and every open session.

It reads a snapshot of the table's file, so that the doctor can neither write to the table nor keep it alive.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from triton_omni.core.errors import StageName
from triton_omni.session import ledger_table as table
from triton_omni.session.ledger_table import STAGES, Table
from triton_omni.session.server_folder import is_running


@dataclass(frozen=True)
class StageView:
    """One stage's block of the ledger."""

    pid: int
    """Process that serves it, or last did; 0 = none, or it has left in order."""
    runs: bool
    """True if the process exists."""
    epoch: int
    """How often it was loaded."""
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
    """Those that only this process can end."""


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
