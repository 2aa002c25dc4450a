# SPDX-License-Identifier: Apache-2.0
"""Puts reports of `scripts/compare` together: median and range of each figure over starts of a server and runs.

    python scripts/over_starts.py out/caches other/caches [-o figures.json]

Variants `plain.1` and `plain.2` are starts of `plain`, loads `one.1` and `one.2` runs of `one`.
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
    """A figure: its unit, and how a run of a report tells it; None where it does not."""

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

Figures = Mapping[str, list[float]]
"""Values by `FIGURE/VARIANT/LOAD`, in the order of the reports."""


def figures(reports: Iterable[Path]) -> Figures:
    """The figures of reports of bench that lie as `scripts/compare` lays them: `VARIANT/LOAD.json`."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for path in reports:
        variant, load = (_NUMBER.sub("", name) for name in (path.parent.name, path.stem))
        for run in json.loads(path.read_text(encoding="utf-8"))["runs"]:
            for name, kind in KINDS.items():
                if (value := kind.of(run)) is not None:
                    found[f"{name}/{variant}/{load}"].append(round(value, kind.digits))
    return found


def summary(found: Figures) -> Iterator[str]:
    """One line a load and variant: median, and least and greatest of several values; lines of Markdown."""
    return table(("load", "variant", *KINDS), _rows(found))


def _rows(found: Figures) -> Iterator[list[str]]:
    rows = dict.fromkeys(tuple(reversed(key.split("/")[1:])) for key in found)
    for load, variant in sorted(rows, key=_natural):
        cells = (_cell(found.get(f"{name}/{variant}/{load}", []), kind.digits) for name, kind in KINDS.items())
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
    folders: Annotated[list[Path], typer.Argument(exists=True, file_okay=False, help="results of scripts/compare")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="JSON, as in docs/gpu-runs")] = None,
) -> None:
    """Print median and range over starts and runs."""
    reports = [path for folder in folders for path in sorted(folder.glob("*/*.json"))]
    if not reports:
        raise typer.BadParameter(f"no report VARIANT/LOAD.json in {', '.join(map(str, folders))}", param_hint="FOLDERS")
    found = figures(reports)
    typer.echo("\n".join(summary(found)))
    if output is not None:
        part = folders[0].name
        written = {
            key: {"values": values, "unit": KINDS[key.partition("/")[0]].unit, "part": part}
            for key, values in found.items()
        }
        output.write_text(json.dumps({"figures": written}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
