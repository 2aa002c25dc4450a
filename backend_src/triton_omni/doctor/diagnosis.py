# SPDX-License-Identifier: Apache-2.0
"""Findings about a server at one moment, from its ledger, its metrics page (Prometheus' text form) and Triton.

A finding has a name, by which it is recognised later, and a sentence. Some come and go while sessions begin and end;
only those that stay are reported (`doctor/cli.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from triton_omni.core.errors import StageName
from triton_omni.session.ledger_table import STAGES
from triton_omni.session.ledger_view import LedgerView, StageView, UnaryView

# --- the metrics' page ------------------------------------------------------------------------------------------------


_FETCH_TIMEOUT_S = 5.0


class MetricsPage:
    """The samples of one page.

    Raises:
        ValueError: the text is none.
    """

    def __init__(self, text: str) -> None:
        families = text_string_to_metric_families(text)
        self._samples = [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]

    @property
    def names(self) -> frozenset[str]:
        """Names of all samples."""
        return frozenset(name for name, _, _ in self._samples)

    def value(self, name: str, **labels: str) -> float | None:
        """The sum of all samples of this name with at least these labels; None = there is none."""
        found = [value for own, has, value in self._samples if own == name and labels.items() <= has.items()]
        return sum(found) if found else None


def fetch_page(url: str) -> MetricsPage:
    """The page at `url`.

    Raises:
        OSError: nobody answers there.
        ValueError: it is no page of metrics.
    """
    with urlopen(url, timeout=_FETCH_TIMEOUT_S) as answer:
        return MetricsPage(answer.read().decode("utf-8", errors="replace"))


# --- findings ---------------------------------------------------------------------------------------------------------


SILENT_S: Final = 5.0
"""A loop turns at least every 0.05 s, unless it is in an engine's step."""
OVERDUE_S: Final = 10.0
"""A session ends at its deadline; the later stages, and a thinker in a long step, get a few seconds more."""

_SETTLED_S: Final = 1.0

Finding = tuple[str, str]
"""Its name and its sentence."""


@dataclass(frozen=True)
class Sample:
    """One sample of a server's state."""

    ledger: LedgerView | None = None
    """None = it cannot be seen from here."""
    may_hold: Mapping[StageName, frozenset[str]] = field(default_factory=dict)
    """Names of the sessions that each stage may have held when its metrics were published."""
    metrics: MetricsPage | None = None
    """None = the endpoint gave none."""
    faults: tuple[Finding, ...] = ()
    """Requests without an answer, and faults of the machine."""
    start: Finding | None = None
    """Progress of a server that is still starting."""
    loading: Mapping[StageName, int] = field(default_factory=dict)
    """Processes of stages that the ledger does not know yet."""

    @property
    def seen(self) -> bool:
        """True if anything of the server could be read."""
        return self.ledger is not None or self.metrics is not None

    def figure(self, name: str, stage: StageName) -> int | None:
        """One of a stage's figures; None where no living process has published any, as before its first request.

        Triton shows those of the process before it until then, and those of a dead one.
        """
        if self.metrics is None:
            return None
        starts = self.metrics.value("omni_stage_starts", stage=stage)
        view = None if self.ledger is None else self.ledger.stages[stage]
        if view is not None and (starts != view.epoch or view.lost or not view.runs):
            return None
        value = self.metrics.value(f"omni_{name}", stage=stage)
        return None if value is None else int(value)

    def held(self, name: str, stage: StageName) -> int:
        """One of a stage's figures; 0 where there is none."""
        return self.figure(name, stage) or 0


def findings(sample: Sample) -> dict[str, str]:
    """Return all faults of this moment: sentences by name. A server that still starts has only that finding."""
    if sample.start is not None:
        return dict([sample.start])
    found = [*sample.faults, *_of_page(sample.metrics)]
    if sample.ledger is not None:
        for stage, view in sample.ledger.stages.items():
            found += _of_stage(stage, view, sample.loading.get(stage, 0))
        found += _of_unary(sample.ledger.unary)
        found += _of_sessions(sample.ledger)
    for stage in STAGES:
        found += _of_figures(stage, sample)
    return dict(found)


def _of_page(page: MetricsPage | None) -> Iterator[Finding]:
    """A page of something else has no figure that could be wrong."""
    if page is not None and not any(name.startswith(("nv_", "omni_")) for name in page.names):
        yield (
            "server/page",
            "what answers there has no metrics of Triton, which are at http://HOST:8002/metrics unless told otherwise",
        )


def _of_stage(stage: StageName, view: StageView, loading: int) -> Iterator[Finding]:
    now = f"loads again as process {loading}" if loading else "is not loaded again yet"
    if not view.epoch:
        yield f"{stage}/absent", f"{stage} was never loaded"
    elif view.lost:
        yield f"{stage}/lost", f"{stage} has died (process {view.pid}, start {view.epoch}) and {now}"
    elif not view.pid:
        yield f"{stage}/left", f"{stage} is not loaded: it has left in order"
    elif not view.runs:
        yield f"{stage}/gone", f"{stage}: process {view.pid} is gone, and nobody has noticed yet"
    elif view.broken:
        yield f"{stage}/broken", f"{stage}: its engine has failed (start {view.epoch}) and it {now}"
    elif view.silent_s > SILENT_S:
        yield (
            f"{stage}/silent",
            f"{stage}: its loop has not turned for {view.silent_s:.0f} s (process {view.pid}); it is in a long step of "
            "its engine, or hangs",
        )


def _of_unary(view: UnaryView) -> Iterator[Finding]:
    if view.pid and not view.runs:
        requests = f"{view.open_requests} request{'s' * (view.open_requests != 1)}"
        yield "unary/gone", f"unary: process {view.pid} is gone with {requests} open, and it is not loaded again yet"


def _of_sessions(ledger: LedgerView) -> Iterator[Finding]:
    for session in ledger.sessions:
        if session.overdue_s > OVERDUE_S:
            waits = [stage for stage in STAGES if stage not in session.closed]
            yield (
                f"session/{session.name}",
                f"session {session.name} is open {session.overdue_s:.0f} s after its deadline; not closed by "
                f"{', '.join(waits)}",
            )


def _of_figures(stage: StageName, sample: Sample) -> Iterator[Finding]:
    held = sample.held("sessions", stage)
    if leaked := sample.held("leaked_sessions", stage):
        yield f"{stage}/leaked", f"{stage} says itself that {_sessions(leaked)} it holds have long been over"
    if (open_now := _unheld(sample)) and stage == "thinker" and held < open_now:
        yield f"{stage}/unheld", f"the ledger has {_sessions(open_now)} open, the thinker holds {held}"
    if stage in sample.may_hold and held > (known := len(sample.may_hold[stage])):
        yield (
            f"{stage}/excess",
            f"{stage} holds {_sessions(held)}, the ledger knows of {known} that it may hold: {held - known} leaked",
        )
    for figure, what in _OF_SESSIONS.items():
        if (found := sample.held(figure, stage)) and not held:
            yield f"{stage}/{figure}", f"{stage} holds no session, and {found} {what}"
    if stage != "token2wav" and (found := sample.held("running", stage) + sample.held("waiting", stage)) > held:
        yield f"{stage}/sequences", f"{stage}: its engine has {found} sequences for {_sessions(held)}"


def _unheld(sample: Sample) -> int:
    """Sessions that the thinker must hold, since they have been open for longer than its figures are old."""
    if sample.ledger is None or sample.figure("sessions", "thinker") is None:
        return 0
    return sum(session.age_s > _SETTLED_S for session in sample.ledger.sessions)


_OF_SESSIONS: Final = {
    "running": "running sequences",
    "waiting": "waiting sequences",
    "kv_blocks_used": "KV blocks",
    "rows_used": "rows of device memory",
    "outbox": "rows or codes that wait to leave",
}


def _sessions(count: int) -> str:
    return f"{count} session{'s' * (count != 1)}"
