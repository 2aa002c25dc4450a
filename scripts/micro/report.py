# SPDX-License-Identifier: Apache-2.0
"""The report of a run: one JSON object (docs/benchmarks.md has its keys) and a table on the terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from .figures import OURS, ratios
from .plan import Plan

SCHEMA, SCHEMA_VERSION = "triton-omni-micro", 2
PAIRS = (("thinker", "thinker-vllm"), ("talker", "talker-vllm"), ("media", "media-vllm"))
"""Measurements that are comparable only if their engines' facts are equal."""


@dataclass
class Result:
    """Results of one measurement so far."""

    machine: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the engine, where two must be equal to be compared."""
    figures: list[Mapping[str, Any]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Seconds of each line of the child: start of Python and torch, the engine, then every figure."""

    def phases(self) -> dict[str, float]:
        """Seconds by phase: `start`, `engine`, `figures`."""
        parts = {"start": self.seconds[:1], "engine": self.seconds[1:2], "figures": self.seconds[2:]}
        return {name: round(sum(values), 3) for name, values in parts.items() if values}


@dataclass
class Run:
    """Results of the measurements so far."""

    plan: Plan
    command: Sequence[str]
    results: dict[str, Result] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    unfinished: list[str] = field(default_factory=list)
    """Measurements that have not ended, in the order of the run."""
    begun: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """When it began, as `triton-omni bench` writes it."""

    def take(self, name: str, line: Mapping[str, Any]) -> None:
        """Take what the child of this measurement tells: `machine`, `ready` or `figure`, see `child.py`."""
        result = self.results.setdefault(name, Result())
        result.seconds.append(line["took_s"])
        if "figure" in line:
            result.figures.append(line["figure"])
        elif "ready" in line:
            result.facts = line["ready"]
        else:
            result.machine = line["machine"]

    def differences(self) -> dict[str, list[str]]:
        """Names of facts in which an engine and its reference differ; their ratio would mean nothing."""
        found = {}
        for ours, reference in PAIRS:
            if ours in self.results and reference in self.results:
                mine, theirs = self.results[ours].facts, self.results[reference].facts
                unequal = [name for name in mine if mine[name] != theirs.get(name)]
                if unequal:
                    found[ours] = unequal
        return found

    def report(self) -> dict[str, Any]:
        """The JSON object."""
        figures = [figure for result in self.results.values() for figure in result.figures]
        unlike = self.differences()
        comparable = [figure for figure in figures if figure["name"].removesuffix("_step") not in unlike]
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "environment": self._environment(),
            "plan": self.plan.to_json(),
            "engines": {name: result.facts for name, result in self.results.items() if result.facts},
            "seconds": {name: result.phases() for name, result in self.results.items()},
            "figures": figures,
            "ratios": ratios(comparable),
            "not_comparable": unlike,
            "failures": self.failures,
            "unfinished": self.unfinished,
        }

    def _environment(self) -> dict[str, Any]:
        machine: Mapping[str, Any] = next((result.machine for result in self.results.values()), {})
        return {"date": self.begun, "command": list(self.command), **machine}


def line_of(figure: Mapping[str, Any]) -> str:
    """A figure in one line, as it is printed when it comes."""
    of = f" ({figure['by']})" if figure["by"] != OURS else ""
    numbers = f"p50 {figure['p50']:.2f} {figure['unit']}, p90 {_shown(figure['p90'])}, n {figure['count']}"
    return f"{figure['name']}{of} {_words(figure['parameters'])}: {numbers}"


def write(report: Mapping[str, Any], path: Path) -> None:
    """Replace the file as a whole, so that whoever stops us leaves the last report, not half of one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(report, indent=2), encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def table(report: Mapping[str, Any]) -> Table:
    """A line a figure of ours, its reference's median and their ratio beside it; then references without one."""
    found = Table(box=SIMPLE_HEAD, padding=0)
    for heading in ("figure", "of", "p50", "p90", "reference", "ratio"):
        found.add_column(heading, no_wrap=heading not in ("of", "reference"), overflow="fold")
    known = {(item["name"], _words(item["parameters"])): item for item in report["ratios"]}
    medians = {(item["name"], item["by"], _words(item["parameters"])): item["p50"] for item in report["figures"]}
    for figure in report["figures"]:
        place = (figure["name"], _words(figure["parameters"]))
        ratio = known.get(place)
        if ratio is not None and figure["by"] == ratio["reference"]:
            continue
        whose = "" if figure["by"] == OURS else f"\n({figure['by']})"
        beside = ("", "")
        if ratio is not None:
            median = medians[place[0], ratio["reference"], place[1]]
            beside = (f"{ratio['reference']} {median:.2f}", f"{ratio['ratio']:.2f}")
        numbers = (f"{figure['p50']:.2f}", _shown(figure["p90"]))
        found.add_row(f"{place[0]}, {figure['unit']}{whose}", place[1], *numbers, *beside)
    return found


def _shown(value: float | None) -> str:
    """A dash where there are too few values."""
    return "-" if value is None else f"{value:.2f}"


def _words(parameters: Mapping[str, Any]) -> str:
    """Parameters in few words: a number with its name, a name by itself."""
    return ", ".join(value if isinstance(value, str) else f"{name} {value}" for name, value in parameters.items())
