# SPDX-License-Identifier: Apache-2.0
"""Tells where each stage's time went under a load, from reports of `triton-omni bench`.

    python scripts/stage_time.py out/crowd_time/shipped/listeners-32.json...

A stage's loop does one thing at a time, so a column adds up to the seconds between two readings of the metrics: the
load and three seconds at most of rest. `device` are waits for decode steps and for windows. A step with prompts, or
on a CPU, is a whole `vllm_step`. `claim`, `pause` and `gather` are waits by the rules of `triton_omni.policy`. NVML's
account of the GPU by stage has no part in the sums: a GPU works on while the host does. On a CPU token2wav solves
within its `step`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from markdown_table import table

from triton_omni.core.metrics import Doing
from triton_omni.session.ledger_table import STAGES

Counted = Mapping[str, Mapping[str, float]]
_BUSY = "utilization"


def stage_table(counters: Counted, busy: Mapping[str, float]) -> Iterator[str]:
    """Seconds of each stage by what its loop did; steps, and the GPU's share; lines of Markdown.

    Args:
        counters: of a run, by stage.
        busy: share of the run's time, 0 to 1, in which the GPU worked for a stage.
    """
    return table(("seconds", *STAGES), _stage_rows(counters, busy))


def _stage_rows(counters: Counted, busy: Mapping[str, float]) -> Iterator[list[str]]:
    for doing in get_args(Doing):
        seconds = [counters.get(stage, {}).get(f"loop_seconds/{doing}", 0.0) for stage in STAGES]
        if any(seconds):
            yield [doing, *(f"{each:.2f}" for each in seconds)]
    yield ["all", *(f"{_loop_seconds(counters.get(stage, {})):.2f}" for stage in STAGES)]
    steps = [counters.get(stage, {}).get("batch_size_count", 0.0) for stage in STAGES]
    held = [counters.get(stage, {}).get("batch_size_sum", 0.0) for stage in STAGES]
    yield ["steps, batches", *(f"{count:.0f}" for count in steps)]
    sizes = (f"{each / count:.1f}" if count else "-" for each, count in zip(held, steps, strict=True))
    yield ["sequences a step", *sizes]
    yield ["GPU, %", *(f"{100 * busy[stage]:.0f}" if stage in busy else "-" for stage in STAGES)]


def window_table(counters: Mapping[str, float]) -> Iterator[str]:
    """Windows of token2wav by kind, and the seconds of their batches; lines of Markdown."""
    return table(("windows", "number", "seconds", "ms a window"), _window_rows(counters))


def _window_rows(counters: Mapping[str, float]) -> Iterator[list[str]]:
    for name, count in counters.items():
        if name.startswith("window_seconds_count/"):
            kind = name.rpartition("/")[2]
            seconds = counters[f"window_seconds_sum/{kind}"]
            yield [kind, f"{count:.0f}", f"{seconds:.2f}", f"{1000 * seconds / count:.1f}"]


def tables(report: Any) -> Iterator[str]:
    """Both tables of each run of a report.

    Raises:
        SystemExit: the report has no counters.
    """
    for run in report["runs"]:
        counters: Counted = run.get("counters", {})
        if not counters:
            raise SystemExit("a run has no counters: give `triton-omni bench` the server's --metrics-url")
        busy: dict[str, float] = {
            stage: run["resources"][name]["mean"]
            for stage in STAGES
            if (name := f"stage/{stage}/{_BUSY}") in run["resources"]
        }
        mode, value = run["load"]["mode"], run["load"]["value"]
        yield from ["", f"{mode} {value:g}, {run['summary']['duration_s']:.2f} s", ""]
        yield from [*stage_table(counters, busy), "", *window_table(counters.get("token2wav", {}))]


def _loop_seconds(counters: Mapping[str, float]) -> float:
    return sum(value for name, value in counters.items() if name.startswith("loop_seconds/"))


def main(
    reports: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="reports of triton-omni bench")],
) -> None:
    """Print where each stage's time went."""
    for path in reports:
        typer.echo("\n".join([f"{path}:", *tables(json.loads(path.read_text(encoding="utf-8")))]))


if __name__ == "__main__":
    typer.run(main)
