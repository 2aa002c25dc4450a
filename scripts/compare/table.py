# SPDX-License-Identifier: Apache-2.0
"""Tables that set reports of bench, or of evaluate, beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.table import Table

from triton_omni_client.bench.nvml import STAGES
from triton_omni_client.evaluate.tables import compared as compared_settings

_FIGURES = (
    "first\ntext ms",
    "first audio\nms, p50/p95",
    "real-time\nfactor",
    "speech\ns/s",
    "under-\nruns",
    "silence\ns",
    "errors",
)


def compared(reports: Mapping[tuple[str, str], Any]) -> Table:
    """One line a load and variant, the variants of one load beside each other; underruns and silence of a reply.

    Args:
        reports: by variant and load, the JSON of its report (docs/benchmarks.md).
    """
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("load", min_width=5, no_wrap=True)
    table.add_column("variant", min_width=7, overflow="fold")
    for heading in _FIGURES:
        table.add_column(heading, justify="right", no_wrap=True)
    for _, row in sorted(_rows(reports), key=lambda found: found[0]):
        table.add_row(*row)
    return table


def resident(reports: Mapping[tuple[str, str], Any], before: Mapping[str, float]) -> Mapping[str, Mapping[str, float]]:
    """By variant the most GiB of its loads by stage, of all else (`other`: Triton, MPS), and `together`.

    Args:
        reports: by variant and load, the JSON of its report.
        before: MiB in use of each GPU (`gpu/0/memory_mib`) before a server started.
    """
    return {variant: _resident(variant, reports, before) for variant in dict.fromkeys(name for name, _ in reports)}


def _resident(variant: str, reports: Mapping[tuple[str, str], Any], before: Mapping[str, float]) -> Mapping[str, float]:
    found = [run["resources"] for (name, _), report in reports.items() if name == variant for run in report["runs"]]
    stages = {stage: max(_peak(run, f"stage/{stage}/memory_mib") for run in found) for stage in STAGES}
    together = max(sum(_peak(run, gpu) - used for gpu, used in before.items()) for run in found)
    mib = stages | {"other": together - sum(stages.values()), "together": together}
    return {name: value / 1024 for name, value in mib.items()}


def resident_table(found: Mapping[str, Mapping[str, float]]) -> Table:
    """One line a variant of `resident`."""
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("GiB", overflow="fold")
    for heading in (*STAGES, "other", "together"):
        table.add_column(heading, justify="right", no_wrap=True)
    for variant, gib in found.items():
        table.add_row(variant, *(f"{value:.1f}" for value in gib.values()))
    return table


def _peak(resources: Mapping[str, Mapping[str, float]], name: str) -> float:
    return resources[name]["max"] if name in resources else 0.0


def judged(reports: Mapping[tuple[str, str], Any]) -> Table:
    """One line a variant, load and setting of `triton-omni evaluate`, in the order in which they were asked."""
    loads = {load for _, load in reports}
    return compared_settings(
        {
            f"{variant}{f', {load}' if len(loads) > 1 else ''}: {setting['name']}": setting["figures"]
            for (variant, load), report in reports.items()
            for setting in report["settings"]
        }
    )


def _rows(reports: Mapping[tuple[str, str], Any]) -> Iterator[tuple[tuple[int, str, float], list[str]]]:
    """Return each row's sort key and its cells; rows follow the order of variants."""
    loads = list(dict.fromkeys(load for _, load in reports))
    for (variant, load), report in reports.items():
        for run in report["runs"]:
            mode, value = run["load"]["mode"], run["load"]["value"]
            label = f"{value:g}" if mode == "closed" else f"{value:g}/s"
            name = "" if load == "bench" else f"{load} "
            yield (loads.index(load), mode, value), [f"{name}{label}", variant, *_figures(run["summary"])]


def _figures(found: Mapping[str, Any]) -> Iterator[str]:
    audio = found["time_to_first_audio_s"]
    yield _number(found["time_to_first_text_s"]["p50"], 1000)
    yield f"{_number(audio['p50'], 1000)}/{_number(audio['p95'], 1000)}"
    yield _number(found["real_time_factor"]["p50"], digits=2)
    yield _number(found["audio_seconds_per_s"], digits=1)
    yield _number(found["underruns"], 1 / max(found["completed"], 1), digits=1)
    yield _number(found["silence_per_request_s"]["mean"], digits=2)
    yield str(sum(found["errors"].values()))


def _number(value: float | None, factor: float = 1, digits: int = 0) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"
