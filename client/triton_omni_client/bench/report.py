# SPDX-License-Identifier: Apache-2.0
"""The report: everything that was measured, as one JSON object of a versioned schema (docs/benchmarks.md).

Pure but for `write`. Times are in seconds unless their name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from triton_omni_client.report_file import rounded, write_report

from .hops import HopTimes
from .metrics import metrics_of
from .records import Load, RequestRecord
from .resources import Usage
from .summary import Summary, summarise

SCHEMA = "triton-omni-bench"
SCHEMA_VERSION = 2
OF_A_TURN = ("completed", "errors", "prompt_tokens", "time_to_first_text_s", "time_to_first_audio_s")
"""Figures of the summary that are told for each turn."""


@dataclass(frozen=True)
class Run:
    """One load and what came of it."""

    load: Load
    records: Sequence[RequestRecord]
    resources: Mapping[str, Usage] = field(default_factory=dict)
    complete: bool = True
    """False where the run was cut short."""
    client_lag_s: float | None = None
    """The worst delay of the load generator's own event loop; None where it is not known."""

    hops: Mapping[str, Mapping[str, HopTimes]] = field(default_factory=dict)
    """Times of messages to a stage until they `arrived` and until they were `taken`."""
    counters: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """What each stage counted, `counters.Counters`."""
    streamed: bool = True
    """False where each reply came in one response, which tells nothing of how it would have played on the way."""
    turns: int = 1
    """Turns of each conversation; the record of number i is of turn i % turns. 1 = no conversations."""

    @cached_property
    def summary(self) -> Summary:
        """Its figures."""
        return summarise(self.records, streamed=self.streamed)

    @cached_property
    def by_turn(self) -> list[Summary]:
        """Its figures for each turn of the conversations, the first turn first; empty where there are none."""
        turns = range(self.turns if self.turns > 1 else 0)
        return [
            summarise([record for record in self.records if record.index % self.turns == turn], streamed=self.streamed)
            for turn in turns
        ]


@dataclass
class Report:
    """Runs, and what they were made with."""

    environment: Mapping[str, Any]
    workload: Mapping[str, Any]
    runs: list[Run] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Missing figures with the reason."""

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        head = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION}
        body = {"environment": self.environment, "workload": self.workload, "notes": self.notes}
        whole: dict[str, Any] = rounded(head | body | {"runs": [_run(run) for run in self.runs]})
        return whole

    def write(self, path: Path) -> None:
        """Write the report.

        Raises:
            BadRequest: the file cannot be written.
        """
        write_report(path, self.to_json())


def _run(run: Run) -> dict[str, Any]:
    return {
        "load": asdict(run.load),
        "complete": run.complete,
        "client_lag_s": run.client_lag_s,
        "summary": asdict(run.summary),
        "turns": [{name: asdict(summary)[name] for name in OF_A_TURN} for summary in run.by_turn],
        "resources": {name: asdict(usage) for name, usage in run.resources.items()},
        "hops": {stage: {end: asdict(times) for end, times in ends.items()} for stage, ends in run.hops.items()},
        "counters": run.counters,
        "requests": [
            _request(record, streamed=run.streamed) for record in sorted(run.records, key=lambda record: record.index)
        ],
    }


def _request(record: RequestRecord, *, streamed: bool) -> dict[str, Any]:
    written = asdict(record)
    written["chunks"] = [[chunk.at_s, chunk.seconds] for chunk in record.chunks]
    return written | {"metrics": asdict(metrics_of(record, streamed=streamed))}
