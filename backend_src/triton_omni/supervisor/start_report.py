# SPDX-License-Identifier: Apache-2.0
"""Reports a server's start on standard error, one line a step, and the stages loaded so far."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from triton_omni.core.errors import StageName
from triton_omni.session.ledger_table import STAGES
from triton_omni.session.ledger_view import read_ledger
from triton_omni.session.server_folder import LedgerError, ledger_name, table_path

_LOOKS_APART_S = 0.5
_FIRST_REMINDER_S = 60.0
"""Each further one comes after twice the time."""


def loaded_stages(pid: int) -> list[StageName]:
    """Stages that the tritonserver of this process id has loaded, at least once."""
    try:
        ledger = read_ledger(table_path(ledger_name(pid)))
    except (OSError, LedgerError):  # no stage has made it yet, or the server ended this moment
        return []
    return [stage for stage in STAGES if ledger.stages[stage].epoch]


def stages_of(repository: Path) -> list[StageName]:
    """The stages that a model repository has."""
    return [stage for stage in STAGES if (repository / stage).is_dir()]


class StartReport:
    """Tells of one start, from the process to the first reply.

    Args:
        pid: of tritonserver.
        log: its log; None = standard error.
        stages: what it is to load.
        loaded: what it has loaded by now.
    """

    def __init__(
        self,
        pid: int,
        log: Path | None,
        stages: Sequence[StageName],
        loaded: Callable[[int], Sequence[StageName]] = loaded_stages,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pid, self._loaded, self._clock = pid, loaded, clock
        self._left = list(stages)
        self._begin = self._looked = clock()
        self._reminder_s = _FIRST_REMINDER_S
        _say(f"tritonserver is process {pid}, its log {'is here' if log is None else log}")
        if stages:
            _say(f"{_joined(self._left)} load; the first start on a machine compiles, which can take minutes")

    def look(self) -> None:
        """See what has been loaded since; to be called again and again."""
        now = self._clock()
        if not self._left or now - self._looked < _LOOKS_APART_S:
            return
        self._looked, seconds = now, now - self._begin
        for stage in set(self._left).intersection(self._loaded(self._pid)):
            self._left.remove(stage)
            _say(f"{stage} is loaded after {seconds:.0f} s")
        if self._left and seconds >= self._reminder_s:
            self._reminder_s *= 2
            _say(f"{_joined(self._left)} still load{'s' * (len(self._left) == 1)} after {seconds:.0f} s")

    @staticmethod
    def warms_up() -> None:
        """All models are loaded, and the server's own first reply is asked for."""
        _say("all models are loaded; a first reply is spoken, so that callers need not wait for what it prepares")


def _joined(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _say(text: str) -> None:
    print(f"starting: {text}", file=sys.stderr, flush=True)
