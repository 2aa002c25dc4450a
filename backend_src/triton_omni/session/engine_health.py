# SPDX-License-Identifier: Apache-2.0
"""A stage's engine as long as it works, and what is left to say once it has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from triton_omni.core.errors import InternalError, StageName
from triton_omni.core.metrics import Doing, Metric
from triton_omni.session.engine import AnyEngine, EngineStats
from triton_omni.session.ledger import SessionLedger
from triton_omni.session.ledger_table import FAULTS
from triton_omni.session.stage import StageStats

_NOTHING: Final = EngineStats(0, 0, 0, 0)


class EngineHealth:
    """Asks an engine nothing more once it has failed. Used by the stage's loop; `stats` by any thread.

    Args:
        stage: whose engine it is.
        engine: stepped by the stage's loop alone.
        ledger: tells the supervisor of a failure, which starts the stage again.
    """

    def __init__(self, stage: StageName, engine: AnyEngine, ledger: SessionLedger) -> None:
        self._stage, self._engine, self._ledger = stage, engine, ledger
        self.stats = _NOTHING
        """Figures of the last look; zeros after a failure."""
        self.failure: InternalError | None = None
        """The error that ends every session; None while the engine works."""

    def refresh(self) -> None:
        """Take the engine's figures of this moment."""
        if self.failure is None:
            self.stats = self._engine.stats()

    def waits_for(self, rule: Doing | None = None) -> Doing:
        """Return what a stage waits for while it does no work; `rule` is what keeps it from work, if anything does."""
        return (rule or "input") if self.stats.running else "idle"

    def stage_stats(self, sessions: int, held: int) -> StageStats:
        """Return the figures of the last look, for a stage with so many sessions and items that wait to leave."""
        engine = self.stats
        return StageStats(sessions, engine.running, engine.waiting, engine.kv_blocks_used, engine.rows_used, held)

    def metrics(self) -> Iterator[Metric]:
        """Yield the metrics of the engine and of its watch; called by any thread."""
        yield Metric("omni_kv_blocks_limit", self.stats.kv_blocks_limit)
        yield Metric("omni_kv_blocks_cached", self.stats.kv_blocks_cached)
        yield Metric("omni_row_mirror_bytes", self.stats.mirror_bytes)
        yield Metric("omni_supervisor_faults", self._ledger.word(FAULTS))
        for kind, seconds in self.stats.windows.items():
            yield from seconds.metrics("omni_window_seconds", kind=kind)
        for (kind, phase), total in self.stats.window_phases.items():
            yield Metric("omni_window_phase_seconds_total", total, {"kind": kind, "phase": phase})

    def has_work(self) -> bool:
        """Return True if the engine could advance now."""
        return self.failure is None and self._engine.has_work()

    def abort(self, key: str) -> None:
        """Drop a sequence of a working engine."""
        if self.failure is None:
            self._engine.abort(key)

    def fail(self, error: Exception, end_all: Callable[[InternalError], None]) -> None:
        """Handle an exception of the engine: `end_all` ends the open sessions, and the supervisor is told."""
        # The engine's state is lost, so its figures are not read again.
        self.stats = _NOTHING
        self.failure = InternalError(f"the engine of {self._stage} failed: {type(error).__name__}", stage=self._stage)
        end_all(self.failure)
        self._ledger.say_broken()
