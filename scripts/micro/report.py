# SPDX-License-Identifier: Apache-2.0
"""The report of a run: one JSON object (docs/benchmarking.md has its keys) and a table on the terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from .figures import OURS, ratios
from .plan import Plan

SCHEMA, SCHEMA_VERSION = "triton-omni-micro", 1
PAIRS = (("thinker", "thinker-vllm"), ("talker", "talker-vllm"))
"""Measurements that are comparable only if their engines' facts are equal."""


@dataclass
class Run:
    """What came of the measurements so far."""

    plan: Plan
    command: Sequence[str]
    results: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def differences(self) -> dict[str, list[str]]:
        """Names of facts in which an engine and its reference differ; their ratio would mean nothing."""
        found = {}
        for ours, reference in PAIRS:
            if ours in self.results and reference in self.results:
                mine, theirs = self.results[ours]["facts"], self.results[reference]["facts"]
                unequal = [name for name in mine if mine[name] != theirs[name]]
                if unequal:
                    found[ours] = unequal
        return found

    def report(self) -> dict[str, Any]:
        """The JSON object."""
        figures = [figure for result in self.results.values() for figure in result["figures"]]
        unlike = self.differences()
        comparable = [figure for figure in figures if figure["name"].removesuffix("_step") not in unlike]
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "environment": self._environment(),
            "plan": self.plan.to_json(),
            "engines": {name: result["facts"] for name, result in self.results.items() if "facts" in result},
            "figures": figures,
            "ratios": ratios(comparable),
            "not_comparable": unlike,
            "failures": self.failures,
        }

    def _environment(self) -> dict[str, Any]:
        machine: Mapping[str, Any] = next((result["machine"] for result in self.results.values()), {})
        return {"date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "command": list(self.command), **machine}


def table(report: Mapping[str, Any]) -> Table:
    """A line a figure of ours, its reference's median and their ratio beside it; then references without one."""
    found = Table("figure", "of", "p50", "p90", "reference", "ratio", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    known = {(item["name"], _words(item["parameters"])): item for item in report["ratios"]}
    medians = {(item["name"], item["by"], _words(item["parameters"])): item["p50"] for item in report["figures"]}
    for figure in report["figures"]:
        place = (figure["name"], _words(figure["parameters"]))
        ratio = known.get(place)
        if ratio is not None and figure["by"] == ratio["reference"]:
            continue
        whose = "" if figure["by"] == OURS else f" ({figure['by']})"
        beside = ("", "")
        if ratio is not None:
            median = medians[place[0], ratio["reference"], place[1]]
            beside = (f"{ratio['reference']} {median:.2f}", f"{ratio['ratio']:.2f}")
        numbers = (f"{figure['p50']:.2f}", f"{figure['p90']:.2f}")
        found.add_row(f"{place[0]}{whose}, {figure['unit']}", place[1], *numbers, *beside)
    return found


def _words(parameters: Mapping[str, Any]) -> str:
    """Parameters in few words: a number with its name, a name by itself."""
    return ", ".join(value if isinstance(value, str) else f"{name} {value}" for name, value in parameters.items())
