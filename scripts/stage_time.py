# SPDX-License-Identifier: Apache-2.0
"""Tells where each stage's time went under a load, from reports of `triton-omni bench`.

    python scripts/stage_time.py out/crowd_time/served/shipped/listeners-32.json...

A stage's loop does one thing at a time, so a column adds up to the load's seconds. The two readings of the metrics are
up to three seconds further apart, in which all stages rest: these are not in `idle`. `remainder` is what no row has; it
is below zero if stages worked outside the load, as for requests before it.

`device` are waits for decode steps and for windows. A step with prompts, or on a CPU, is a whole `vllm_step`. `claim`
and `pause` are waits by the rules of `triton_omni.policy`. On a CPU token2wav solves within its `step`.

A window waits from its codes until its batch is begun (`wait`), and until it is found finished for other batches and
for the host (`turn`). `device` has its batch's time on the GPU, by CUDA events. `seconds` are its share of that time by
frames, so their sum is token2wav's time on the GPU.

The rows have no order in time. A GPU timeline of three processes needs a profiler in each, which slows the host's
launches, so none is kept. Beside the sums are token2wav's time on the GPU and NVML's account of the GPU by stage. Steps
of thinker and talker have no such events: `device` and `vllm_step` are what their loops saw.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from markdown_table import table

from triton_omni.core.metrics import Doing
from triton_omni.session.engine import WindowKind, WindowPhase
from triton_omni.session.ledger_table import STAGES

Counted = Mapping[str, Mapping[str, float]]
_BUSY = "utilization"


def stage_table(counters: Counted, busy: Mapping[str, float], load_s: float) -> Iterator[str]:
    """Seconds of each stage by what its loop did; steps, and the GPU's share; lines of Markdown.

    Args:
        counters: of a run, by stage.
        busy: share of the run's time, 0 to 1, in which the GPU worked for a stage.
        load_s: from the first request to the end of the last reply.
    """
    return table(("seconds", *STAGES), _stage_rows(counters, busy, load_s))


def _stage_rows(counters: Counted, busy: Mapping[str, float], load_s: float) -> Iterator[list[str]]:
    loops = [loop_seconds(counters.get(stage, {}), load_s) for stage in STAGES]
    for doing in (*get_args(Doing), "remainder"):
        if any(loop[doing] for loop in loops):
            yield [doing, *_seconds(loop[doing] for loop in loops)]
    yield ["the load", *_seconds(sum(loop.values()) for loop in loops)]
    yield ["windows on the GPU", *_seconds(_sum(counters.get(stage, {}), "window_seconds_sum/") for stage in STAGES)]
    steps = [counters.get(stage, {}).get("batch_size_count", 0.0) for stage in STAGES]
    held = [counters.get(stage, {}).get("batch_size_sum", 0.0) for stage in STAGES]
    yield ["steps, batches", *(f"{count:.0f}" for count in steps)]
    sizes = (f"{each / count:.1f}" if count else "-" for each, count in zip(held, steps, strict=True))
    yield ["sequences a step", *sizes]
    yield ["GPU, %", *(f"{100 * busy[stage]:.0f}" if stage in busy else "-" for stage in STAGES)]


def loop_seconds(counters: Mapping[str, float], load_s: float) -> dict[str, float]:
    """Seconds of a loop by what it did, and the `remainder`: together the load's. Rest beyond the load is left out."""
    seconds = {doing: counters.get(f"loop_seconds/{doing}", 0.0) for doing in get_args(Doing)}
    beyond = max(0.0, sum(seconds.values()) - load_s)
    seconds["idle"] = max(0.0, seconds["idle"] - beyond)
    return {**seconds, "remainder": load_s - sum(seconds.values())}


def window_table(counters: Mapping[str, float]) -> Iterator[str]:
    """Windows of token2wav by kind: their seconds on the GPU, and the mean milliseconds of one in each phase; lines of
    Markdown.
    """
    phases = (f"{phase}, ms" for phase in get_args(WindowPhase))
    return table(("windows", "number", "seconds", "ms a window", *phases), _window_rows(counters))


def _window_rows(counters: Mapping[str, float]) -> Iterator[list[str]]:
    kinds = [kind for kind in get_args(WindowKind) if counters.get(f"window_seconds_count/{kind}")]
    for name, of in [*((kind, [kind]) for kind in kinds), ("all", kinds)]:
        count = _total(counters, of, "window_seconds_count/{}")
        seconds = _total(counters, of, "window_seconds_sum/{}")
        phases = [_total(counters, of, f"window_phase_seconds/{{}}/{phase}") for phase in get_args(WindowPhase)]
        means = (f"{1000 * each / count:.1f}" if count else "-" for each in (seconds, *phases))
        yield [name, f"{count:.0f}", f"{seconds:.2f}", *means]


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
        mode, value, load_s = run["load"]["mode"], run["load"]["value"], run["summary"]["duration_s"]
        yield from ["", f"{mode} {value:g}, {load_s:.2f} s", ""]
        yield from [*stage_table(counters, busy, load_s), "", *window_table(counters.get("token2wav", {}))]


def _sum(counters: Mapping[str, float], prefix: str) -> float:
    return sum(value for name, value in counters.items() if name.startswith(prefix))


def _total(counters: Mapping[str, float], kinds: Sequence[str], name: str) -> float:
    return sum(counters.get(name.format(kind), 0.0) for kind in kinds)


def _seconds(values: Iterator[float]) -> Iterator[str]:
    return (f"{value:.2f}" for value in values)


def main(
    reports: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="reports of triton-omni bench")],
) -> None:
    """Print where each stage's time went."""
    for path in reports:
        typer.echo("\n".join([f"{path}:", *tables(json.loads(path.read_text(encoding="utf-8")))]))


if __name__ == "__main__":
    typer.run(main)
