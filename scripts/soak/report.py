# SPDX-License-Identifier: Apache-2.0
"""Report of a run: one JSON object, tables for the terminal, and plots."""

from __future__ import annotations

import json
import math
import os
import platform
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from .judging import Soaked, faults
from .watching import MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DPI = 130
_WINDOW = 40
"""Requests whose median is one point of a line."""
_COLOURS = {
    "finished": "#2ca02c",
    "cancelled": "#7f7f7f",
    "refused": "#ff7f0e",
    "timed out": "#9467bd",
    "failed": "#d62728",
}


def to_json(soaked: Soaked) -> dict[str, Any]:
    """The run as plain JSON values, without the single requests."""
    start, end = soaked.first_audio()
    return {
        "schema": "triton-omni-soak",
        "schema_version": 1,
        "machine": {"cpus": len(os.sched_getaffinity(0)), "python": platform.python_version()},
        "options": soaked.options,
        "requests": len(soaked.ended),
        "seconds": round(soaked.seconds, 1),
        "requests_per_s": round(len(soaked.ended) / soaked.seconds, 2),
        "outcomes": dict(soaked.outcomes()),
        "fates": {f"{fate}: {outcome}": count for (fate, outcome), count in sorted(_by_fate(soaked).items())},
        "kinds": dict(Counter(f"{ended.planned.kind}, {ended.planned.way}" for ended in soaked.ended)),
        "first_audio_ms": {"first_third": _rounded(1000 * start), "last_third": _rounded(1000 * end)},
        "kills": [{"stage": k.stage, "at_s": round(k.killed, 1), "back_s": round(k.back, 1)} for k in soaked.kills],
        "processes": [growth.to_json() for growth in soaked.growths()],
        "left": dict(soaked.left),
        "meaning": None if soaked.meaning is None else soaked.meaning.to_json(),
        "stop_s": round(soaked.stop_s, 2),
        "faults": faults(soaked),
    }


def tables(soaked: Soaked) -> list[Table]:
    """Outcomes by fate, and memory by process."""
    outcomes = Table("fate", *_COLOURS, title="how requests ended")
    found = _by_fate(soaked)
    for fate in sorted({fate for fate, _ in found}):
        outcomes.add_row(fate, *(str(found[fate, outcome]) for outcome in _COLOURS))
    memory = Table("process", "MiB", "grown", "noise", "in s", "files", title="resident memory after warm-up")
    for growth in soaked.growths():
        sizes = (f"{size / MIB:.1f}" for size in (growth.mean, growth.grown, growth.noise))
        memory.add_row(f"{growth.name} {growth.pid}", *sizes, f"{growth.span_s:.0f}", f"{growth.files:+d}")
    return [outcomes, memory]


def write(soaked: Soaked, folder: Path) -> list[Path]:
    """Write `soak.json` and the plots into `folder`; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "soak.json"
    report.write_text(json.dumps(to_json(soaked), indent=1) + "\n", encoding="utf-8")
    return [report, _plot(soaked, folder / "soak.png")]


def _by_fate(soaked: Soaked) -> Counter[tuple[str, str]]:
    return Counter((ended.planned.fate, ended.outcome) for ended in soaked.ended)


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 1)


def _plot(soaked: Soaked, path: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 9), dpi=_DPI, layout="constrained")
    memory, audio, outcomes = figure.subplots(3, sharex=True)
    _draw_memory(memory, soaked)
    _draw_first_audio(audio, soaked)
    _draw_outcomes(outcomes, soaked)
    for axes in (memory, audio, outcomes):
        axes.grid(visible=True, color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
        for kill in soaked.kills:
            axes.axvspan(kill.killed / 60, kill.back / 60, color="#d62728", alpha=0.12, linewidth=0)
    outcomes.set_xlabel("minutes since the start (red: a stage was killed and is being started again)")
    figure.savefig(path)
    return path


def _draw_memory(axes: Axes, soaked: Soaked) -> None:
    names = sorted({process.name for process in soaked.processes})
    for number, name in enumerate(names):
        for first, process in enumerate(found for found in soaked.processes if found.name == name):
            label = name if first == 0 else None
            minutes = np.array(process.seconds) / 60
            axes.plot(minutes, np.array(process.resident) / MIB, color=f"C{number}", label=label)
    axes.set(ylabel="resident memory, MiB", ylim=(0, None))
    axes.legend(loc="best", fontsize="small", ncols=3)
    axes.set_title("Memory of each process", loc="left", fontweight="bold")


def _draw_first_audio(axes: Axes, soaked: Soaked) -> None:
    heard = [(ended.began / 60, 1000 * ended.first_audio_s) for ended in soaked.ended if ended.first_audio_s]
    if heard:
        minutes, waits = np.array(heard).T
        axes.plot(minutes, waits, ".", color="0.75", markersize=2, label="each request")
        middles = [slice(at, at + _WINDOW) for at in range(0, len(waits), _WINDOW)]
        line = [(float(np.median(minutes[part])), float(np.median(waits[part]))) for part in middles]
        axes.plot(*np.array(line).T, color="#1f77b4", label=f"median of {_WINDOW}")
        axes.legend(loc="upper right", fontsize="small")
        axes.set_ylim(0, float(np.percentile(waits, 99)) * 1.2)
    axes.set_ylabel("time to first audio, ms")
    axes.set_title("Time to first audio", loc="left", fontweight="bold")


def _draw_outcomes(axes: Axes, soaked: Soaked) -> None:
    for outcome, colour in _COLOURS.items():
        ends = sorted(ended.ended / 60 for ended in soaked.ended if ended.outcome == outcome)
        if ends:
            axes.plot(ends, np.arange(1, len(ends) + 1), color=colour, label=f"{outcome} ({len(ends)})")
    axes.set(ylabel="requests so far", yscale="log")
    axes.legend(loc="lower right", fontsize="small", ncols=2)
    axes.set_title("How requests ended", loc="left", fontweight="bold")
