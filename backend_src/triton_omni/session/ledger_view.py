# SPDX-License-Identifier: Apache-2.0
"""One server's session ledger as it stands at a moment: what each stage says of itself, and every open session.

It reads the table's file and maps nothing, so that who looks on can neither write to it nor keep it alive.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from triton_omni.core.errors import StageName
from triton_omni.session import ledger_layout as layout
from triton_omni.session.ledger_layout import LedgerError


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
    with os.fdopen(layout.open_own(path, os.O_RDONLY), "rb") as file:
        table = file.read()
    if len(table) != layout.TABLE_WORDS * layout.WORD:
        raise LedgerError(f"{path} has {len(table)} bytes, a ledger has {layout.TABLE_WORDS * layout.WORD}")
    with memoryview(table).cast("Q") as words:
        if words[layout.MAGIC_WORD] != layout.MAGIC:
            raise LedgerError(f"{path} is no session ledger")
        now_ns = time.monotonic_ns()
        records = (layout.record(slot) for slot in range(layout.CAPACITY))
        sessions = tuple(_session(words, at, now_ns) for at in records if layout.is_held(words, at))
        pid = words[layout.UNARY_PID]
        unary = UnaryView(pid, layout.is_running(pid), words[layout.UNARY_OPEN])
        return LedgerView({stage: _stage(words, stage) for stage in layout.STAGES}, unary, sessions)


def _stage(words: memoryview, stage: StageName) -> StageView:
    block, epoch = layout.BLOCKS[stage], layout.epoch(words, stage)
    pid = words[block + layout.PID]
    return StageView(
        pid=pid,
        runs=layout.is_running(pid),
        epoch=epoch,
        silent_s=layout.silent_for(words, stage),
        lost=0 < epoch <= words[layout.LOSSES[stage]],
        broken=0 < epoch == words[block + layout.BROKEN],
    )


def _session(words: memoryview, at: int, now_ns: int) -> SessionView:
    deadline_ns = words[at + layout.DEADLINE]
    return SessionView(
        name=f"s{(at - layout.FIRST_RECORD) // layout.RECORD_WORDS}g{words[at + layout.GENERATION]}",
        age_s=(now_ns - words[at + layout.OPENED]) / 1e9,
        overdue_s=(now_ns - deadline_ns) / 1e9 if deadline_ns else float("-inf"),
        closed=frozenset(stage for stage in layout.STAGES if layout.is_closed(words, at, stage)),
    )
