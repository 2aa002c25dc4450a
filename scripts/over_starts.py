# SPDX-License-Identifier: Apache-2.0
"""Puts the reports of a part of `scripts/benchmarks.sh` together: median and range of each figure over starts and runs.

    python scripts/over_starts.py out/caches other/caches [-o figures.json]

Reports of `scripts/compare` and `scripts/micro` lie anywhere under the folders, as `VARIANT/LOAD.json`. Variants
`plain.1` and `plain.2` are starts of `plain`, loads `one.1` and `one.2` runs of `one`.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer
from markdown_table import table

_NUMBER: Final = re.compile(r"\.\d+$")


class Kind(NamedTuple):
    """A figure: its unit, and how a run of a server's report, or a report of stages alone, tells it; None where it does
    not.
    """

    unit: str
    of: Callable[[Any], float | None]
    digits: int = 1


def _milliseconds(name: str, percentile: str) -> Kind:
    def told(run: Any) -> float | None:
        seconds: float | None = run["summary"][name][percentile]
        return None if seconds is None else 1000 * seconds

    return Kind("ms", told)


def _handover(run: Any) -> float | None:
    """Both hops; None where the metrics were not read."""
    hops = [hop["arrived"]["p50_s"] for hop in run.get("hops", {}).values()]
    return 1000 * sum(hops) if len(hops) == 2 and None not in hops else None


def _alone(what: str, value: str, name: str, **parameters: object) -> Callable[[Any], float | None]:
    """The value of what has this name and these parameters, perhaps among others."""

    def told(report: Any) -> float | None:
        same = (found for found in report[what] if found["name"] == name)
        return next((found[value] for found in same if parameters.items() <= found["parameters"].items()), None)

    return told


KINDS: Final[Mapping[str, Kind]] = {
    "first_text_p50": _milliseconds("time_to_first_text_s", "p50"),
    "first_audio_p50": _milliseconds("time_to_first_audio_s", "p50"),
    "first_audio_p95": _milliseconds("time_to_first_audio_s", "p95"),
    "real_time_factor_p50": Kind("1", lambda run: run["summary"]["real_time_factor"]["p50"], 3),
    "speech_per_second": Kind("s", lambda run: run["summary"]["audio_seconds_per_s"]),
    "replies_without_underrun": Kind(
        "1", lambda run: run["summary"]["completed"] - (run["summary"]["requests_with_underruns"] or 0), 0
    ),
    "requests": Kind("1", lambda run: run["summary"]["requests"], 0),
    "handover_p50": Kind("ms", _handover, 2),
}
ALONE: Final[Mapping[str, Kind]] = {
    "thinker_step_ratio_sampled": Kind("1", _alone("ratios", "ratio", "thinker_step", batch=1, mode="sampled"), 3),
    "window_dit": Kind("ms", _alone("figures", "p50", "token2wav_window_dit", batch=1), 2),
}
EVERY: Final = {**KINDS, **ALONE}

Figures = Mapping[str, list[float]]
"""Values by `FIGURE/VARIANT/LOAD`, in the order of the reports."""


def figures(reports: Iterable[Path]) -> Figures:
    """The figures of reports `VARIANT/LOAD.json`."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for path in reports:
        variant, load = (_NUMBER.sub("", name) for name in (path.parent.name, path.stem))
        report = json.loads(path.read_text(encoding="utf-8"))
        runs, kinds = (report["runs"], KINDS) if "runs" in report else ([report], ALONE)
        for run in runs:
            for name, kind in kinds.items():
                if (value := kind.of(run)) is not None:
                    found[f"{name}/{variant}/{load}"].append(round(value, kind.digits))
    return found


def summary(found: Figures) -> Iterator[str]:
    """One line a load and variant: median, and least and greatest of several values; lines of Markdown."""
    kinds = [name for name in EVERY if any(key.startswith(f"{name}/") for key in found)]
    return table(("load", "variant", *kinds), _rows(found, kinds))


def _rows(found: Figures, kinds: Iterable[str]) -> Iterator[list[str]]:
    rows = dict.fromkeys(tuple(reversed(key.split("/")[1:])) for key in found)
    for load, variant in sorted(rows, key=_natural):
        cells = (_cell(found.get(f"{name}/{variant}/{load}", []), EVERY[name].digits) for name in kinds)
        yield [load, variant, *cells]


def _natural(names: tuple[str, ...]) -> list[list[str | int]]:
    """A key that sorts numbers by their value."""
    return [[int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)] for name in names]


def _cell(values: list[float], digits: int) -> str:
    if not values:
        return "-"
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main(
    folders: Annotated[list[Path], typer.Argument(exists=True, file_okay=False, help="results of a part")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="JSON, as in docs/gpu-runs")] = None,
) -> None:
    """Print median and range over starts and runs."""
    reports = [path for folder in folders for path in sorted(folder.rglob("*/*.json"))]
    if not reports:
        raise typer.BadParameter(f"no report VARIANT/LOAD.json in {', '.join(map(str, folders))}", param_hint="FOLDERS")
    found = figures(reports)
    typer.echo("\n".join(summary(found)))
    if output is not None:
        part = folders[0].name
        written = {
            key: {"values": values, "unit": EVERY[key.partition("/")[0]].unit, "part": part}
            for key, values in found.items()
        }
        output.write_text(json.dumps({"figures": written}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
