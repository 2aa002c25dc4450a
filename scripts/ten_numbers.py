# SPDX-License-Identifier: Apache-2.0
"""Writes the table of ten numbers in docs/benchmarks.md from the runs under docs/gpu-runs that its rows name.

    python scripts/ten_numbers.py [--check]

A row takes all values of its figure that its runs have: of one run that measured several times, or of several runs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer
from markdown_table import table

DOCUMENT: Final = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
FOLDER: Final = "gpu-runs"
DAY: Final = "2026-11-26"
"""The day of runs that are named by a letter alone; the document tells it, too."""


class Row(NamedTuple):
    """A number, its target, and where it was measured."""

    title: str
    key: str
    """Of the figure."""
    target: str
    digits: int
    """Decimal places that are shown."""
    runs: str
    """Names of files without `.json`, separated by spaces; those of `DAY` by their letter."""


ROWS: Final = (
    Row("first audio, 1 stream, p50 in ms", "first_audio_p50/7b/one", "≤ 170", 0, "2026-12-01-a"),
    Row("the same, 3B, plan `low_latency`", "first_audio_p50/3b/low_latency/1", "≤ 75", 0, "c d f h"),
    Row("first audio, 32 listeners, p95 in ms", "first_audio_p95/7b/listeners", "≤ 500", 0, "2026-12-01-a"),
    Row(
        "replies without an underrun, of 96 to 32 listeners",
        "replies_without_underrun/7b/listeners",
        "96",
        0,
        "2026-12-01-a",
    ),
    Row("first audio, 32 together, p95 in ms", "first_audio_p95/7b/together", "≤ 500", 0, "2026-12-01-a"),
    Row("speech a second in s, 32 together", "speech_per_second/7b/together", "≥ 50", 1, "2026-12-01-a"),
    Row("real-time factor, 1 stream", "real_time_factor_p50/7b/one", "≤ 0.12", 2, "2026-12-01-a"),
    Row("hand-over, both hops, 1 stream, sum of p50 in ms", "handover_p50/7b/one", "≤ 1", 2, "2026-12-01-a"),
    Row(
        "thinker decode step, sampled, batch 1, as a ratio to plain vLLM's",
        "thinker_step_ratio_sampled/7b/steps",
        "≤ 1.05",
        2,
        "2026-12-01-a",
    ),
    Row("one streaming window, DiT in ms", "window_dit/7b/window", "≤ 25", 1, "2026-12-01-a"),
)


def cells(row: Row, folder: Path) -> list[str]:
    """The cells of a row whose runs lie in `folder`.

    Raises:
        typer.BadParameter: a run is missing or lacks the figure, or runs measured it by different parts.
    """
    names = [run if "-" in run else f"{DAY}-{run}" for run in row.runs.split()]
    figures = [_figure(folder / f"{name}.json", row.key) for name in names]
    part, *others = sorted({figure["part"] for figure in figures})
    if others:
        raise typer.BadParameter(f"{row.key}: {part} and {' and '.join(others)} measured it: name runs of one part")
    values = [value for figure in figures for value in figure["values"]]
    median, least, most = (f"{found(values):.{row.digits}f}" for found in (statistics.median, min, max))
    count = f"{len(values)}{', fewer than three' if len(values) < 3 else ''}"
    links = " ".join(f"[{_short(name)}]({FOLDER}/{name}.json)" for name in names)
    return [f"{row.title} `{row.key}`", row.target, median, f"{least} to {most}", count, f"`{part}`", links]


def _figure(path: Path, key: str) -> Mapping[str, Any]:
    try:
        figures: dict[str, Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["figures"]
    except FileNotFoundError as error:
        raise typer.BadParameter(f"{path} does not exist: name a run that does") from error
    if key not in figures:
        raise typer.BadParameter(f"{path} has no figure {key}: name a run that has it")
    return figures[key]


def _short(name: str) -> str:
    day, _, letter = name.rpartition("-")
    return letter if day == DAY else f"{day[-2:]} {letter}"


def renewed(text: str) -> str:
    """The document with the table of its runs.

    Raises:
        typer.BadParameter: it has no table of these columns; as `cells`.
    """
    head = ("figure", "target", "median", "range", "measured", "command", "runs")
    first, *others = table(head, (cells(row, DOCUMENT.parent / FOLDER) for row in ROWS))
    before, found, after = text.partition(f"{first}\n")
    if not found:
        raise typer.BadParameter(f"{DOCUMENT} has no table that begins with {first}")
    return "\n".join([before + first, *others, after[after.index("\n\n") + 1 :]])


def main(
    check: Annotated[bool, typer.Option("--check", help="write nothing; fail if the table differs")] = False,
) -> None:
    """Write the table, or check it."""
    text = DOCUMENT.read_text(encoding="utf-8")
    if not check:
        DOCUMENT.write_text(renewed(text), encoding="utf-8")
    elif renewed(text) != text:
        raise SystemExit(f"{DOCUMENT}: the ten numbers are not those of their runs; run python scripts/ten_numbers.py")


if __name__ == "__main__":
    typer.run(main)
