# SPDX-License-Identifier: Apache-2.0
"""Puts reports of parts of `scripts/benchmarks.sh` together: median and range of each figure over starts and runs.

    python scripts/over_starts.py out/presets other/presets out/many [-o figures.json]

A folder is named as its part. Reports of `scripts/compare` and `scripts/micro` lie anywhere under it, as
`VARIANT/LOAD.json`. Variants `plain.1` and `plain.2` are starts of `plain`, loads `one.1` and `one.2` runs of `one`.
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

from triton_omni_client.bench.nvml import STAGES

_NUMBER: Final = re.compile(r"\.\d+$")
_OURS: Final = "triton-omni"


class Kind(NamedTuple):
    """A figure: its unit, and how a run of a report by bench, or a report of stages alone or of memory, tells it; None
    where it does not.
    """

    unit: str
    of: Callable[[Any], float | None]
    digits: int = 1


def _milliseconds(name: str, percentile: str) -> Kind:
    def told(run: Any) -> float | None:
        seconds: float | None = run["summary"][name][percentile]
        return None if seconds is None else 1000 * seconds

    return Kind("ms", told)


def _without_underrun(run: Any) -> float:
    return float(run["summary"]["completed"] - (run["summary"]["requests_with_underruns"] or 0))


def _handover(run: Any) -> float | None:
    """Both hops; None where the metrics were not read."""
    hops = [hop["arrived"]["p50_s"] for hop in run.get("hops", {}).values()]
    return 1000 * sum(hops) if len(hops) == 2 and None not in hops else None


def _alone(what: str, value: str, name: str, **parameters: object) -> Callable[[Any], float | None]:
    """The value of what of ours has this name and these parameters, perhaps among others."""

    def told(report: Any) -> float | None:
        same = (found for found in report[what] if found["name"] == name and found.get("by", _OURS) == _OURS)
        return next((found[value] for found in same if parameters.items() <= found["parameters"].items()), None)

    return told


def _memory(name: str) -> Kind:
    return Kind("GiB", lambda report: report["resident"][name])


KINDS: Final[Mapping[str, Kind]] = {
    "first_text_p50": _milliseconds("time_to_first_text_s", "p50"),
    "first_audio_p50": _milliseconds("time_to_first_audio_s", "p50"),
    "first_audio_p95": _milliseconds("time_to_first_audio_s", "p95"),
    "real_time_factor_p50": Kind("1", lambda run: run["summary"]["real_time_factor"]["p50"], 3),
    "speech_per_second": Kind("s", lambda run: run["summary"]["audio_seconds_per_s"]),
    "replies_without_underrun": Kind("1", _without_underrun, 0),
    "requests": Kind("1", lambda run: run["summary"]["requests"], 0),
    "share_without_underrun": Kind("1", lambda run: _without_underrun(run) / run["summary"]["requests"], 3),
    "silence": Kind("s", lambda run: run["summary"]["silence_s"], 2),
    "silence_per_reply": Kind("s", lambda run: run["summary"]["silence_per_request_s"]["mean"], 3),
    "handover_p50": Kind("ms", _handover, 2),
}
ALONE: Final[Mapping[str, Kind]] = {
    "thinker_step_sampled": Kind("ms", _alone("figures", "p50", "thinker_step", batch=1, mode="sampled"), 2),
    "thinker_step_sampled_32": Kind("ms", _alone("figures", "p50", "thinker_step", batch=32, mode="sampled"), 2),
    "thinker_step_ratio_sampled": Kind("1", _alone("ratios", "ratio", "thinker_step", batch=1, mode="sampled"), 3),
    "talker_step_sampled": Kind("ms", _alone("figures", "p50", "talker_step", batch=1, mode="sampled"), 2),
    "talker_step_sampled_32": Kind("ms", _alone("figures", "p50", "talker_step", batch=32, mode="sampled"), 2),
    "window_dit": Kind("ms", _alone("figures", "p50", "token2wav_window_dit", batch=1), 2),
    # Small windows, which a report names first. By their evaluations, for states whose windows had no preset.
    "windows_speech_per_second_reference": Kind(
        "s", _alone("figures", "p50", "token2wav_throughput", batch=32, solver="rk4", evaluations=36)
    ),
    "windows_speech_per_second_fast": Kind(
        "s", _alone("figures", "p50", "token2wav_throughput", batch=32, preset="fast")
    ),
    "regular_windows_speech_per_second_reference": Kind(
        "s", _alone("figures", "p50", "token2wav_throughput", batch=32, windows="regular", preset="reference")
    ),
    "regular_windows_speech_per_second_fast": Kind(
        "s", _alone("figures", "p50", "token2wav_throughput", batch=32, windows="regular", preset="fast")
    ),
}
RESIDENT: Final[Mapping[str, Kind]] = {f"memory_{name}": _memory(name) for name in (*STAGES, "other", "together")}
EVERY: Final = {**KINDS, **ALONE, **RESIDENT}
_REPORTS: Final = {"runs": KINDS, "figures": ALONE, "resident": RESIDENT}
"""Figures of a report by a key that it has; other files have none."""

Figures = Mapping[str, list[float]]
"""Values by `FIGURE/VARIANT/LOAD`, in the order of the reports."""


def figures(reports: Iterable[Path]) -> Figures:
    """The figures of reports `VARIANT/LOAD.json`."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for path in reports:
        variant, load = (_NUMBER.sub("", name) for name in (path.parent.name, path.stem))
        report = json.loads(path.read_text(encoding="utf-8"))
        kinds = next((kinds for key, kinds in _REPORTS.items() if key in report), {})
        for run in report.get("runs", [report]):
            for name, kind in kinds.items():
                if (value := kind.of(run)) is not None:
                    found[f"{name}/{variant}/{load}"].append(round(value, kind.digits))
    return found


def by_part(folders: Iterable[Path]) -> tuple[Figures, Mapping[str, str]]:
    """The figures of all reports under folders, and the part of each.

    Raises:
        typer.BadParameter: there is no report, or two parts have the same figure.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    parts: dict[str, str] = {}
    for folder in folders:
        for key, values in figures(sorted(folder.rglob("*/*.json"))).items():
            if (part := parts.setdefault(key, folder.name)) != folder.name:
                raise typer.BadParameter(f"{key}: {part} and {folder.name} have it: put one of them together alone")
            found[key] += values
    if not found:
        raise typer.BadParameter(f"no report VARIANT/LOAD.json in {', '.join(map(str, folders))}", param_hint="FOLDERS")
    return found, parts


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
    folders: Annotated[list[Path], typer.Argument(exists=True, file_okay=False, help="results of parts")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="JSON, as in docs/gpu-runs")] = None,
) -> None:
    """Print median and range over starts and runs."""
    found, parts = by_part(folders)
    typer.echo("\n".join(summary(found)))
    if output is not None:
        written = {
            key: {"values": values, "unit": EVERY[key.partition("/")[0]].unit, "part": parts[key]}
            for key, values in found.items()
        }
        output.write_text(json.dumps({"figures": written}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
