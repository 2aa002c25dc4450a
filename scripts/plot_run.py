# SPDX-License-Identifier: Apache-2.0
"""Draws what a run's figures show against length of the prompt, turns and listeners, a panel for each that it has.

    python scripts/plot_run.py docs/gpu-runs/2026-11-28-b.json docs/images/first-audio.png

It also takes what `over_starts.py -o` writes, and needs matplotlib. Listeners of the parts `listeners`, `presets`,
`many` and `apart` have a line for each variant.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import matplotlib as mpl
import typer

mpl.use("Agg")
from matplotlib import pyplot as plt

_LISTENERS: Final = r"listeners-(\d+)"
_HEIGHT: Final = 3.8
"""Inches of a row of panels."""
Points = dict[float, list[float]]


class Panel(NamedTuple):
    """Lines that share their axes."""

    title: str
    across: str
    up: str
    lines: Mapping[str, str]
    """By label a regular expression of the keys of its figures, whose group is the number across."""


def _states(start: str, load: str) -> dict[str, str]:
    states = {"as shipped": "balanced", "prefix_caching": "balanced-cached"}
    return {label: f"{start}/7b/{state}/{load}" for label, state in states.items()}


FIRST_AUDIO: Final = (
    Panel(
        "one request",
        "tokens of the prompt",
        "first audio, ms",
        _states("first_audio", r"prompt-(\d+k?)") | {"shipped": r"first_audio_p50/shipped/prompt-(\d+)"},
    ),
    Panel("one conversation", "turn", "first audio, ms", _states("first_audio", r"turn-(\d+)")),
    Panel(
        "32 conversations at once, p95",
        "turn",
        "first audio, ms",
        _states("first_audio_p95", r"32-conversations-turn-(\d+)"),
    ),
    Panel(
        "listeners of 6 s replies",
        "listeners",
        "first audio, ms",
        {quantile: rf"first_audio_{quantile}/7b/balanced/(\d+)-listeners-short" for quantile in ("p50", "p95")},
    ),
)
LISTENERS: Final = {
    "first_audio_p50": ("first audio, p50", "ms"),
    "first_audio_p95": ("first audio, p95", "ms"),
    "share_without_underrun": ("replies without a gap", "share"),
    "silence_per_reply": ("silence of a reply", "s"),
}
"""Title and unit of panels with a line a variant, by figure."""


def panels(figures: Mapping[str, Any]) -> list[Panel]:
    """All panels of which figures have a point."""
    heard = (re.fullmatch(rf"\w+/([^/]+)/{_LISTENERS}", key) for key in figures)
    variants = dict.fromkeys(match[1] for match in heard if match)
    of_listeners = (
        Panel(title, "listeners", up, {name: f"{figure}/{re.escape(name)}/{_LISTENERS}" for name in variants})
        for figure, (title, up) in LISTENERS.items()
    )
    return [
        panel for panel in (*FIRST_AUDIO, *of_listeners) if any(points(figures, keys) for keys in panel.lines.values())
    ]


def points(figures: Mapping[str, Any], keys: str) -> Points:
    """Values by the number in the key that `keys`, a regular expression, has as a group; the least number first."""
    found = {
        float(match[1].replace("k", "000")): figure["values"]
        for key, figure in figures.items()
        if (match := re.fullmatch(keys, key))
    }
    return dict(sorted(found.items()))


def draw(axes: Any, found: Points, label: str) -> None:
    """A line through the medians, and a bar over the range of each."""
    middles = [statistics.median(values) for values in found.values()]
    below = [middle - min(values) for middle, values in zip(middles, found.values(), strict=True)]
    above = [max(values) - middle for middle, values in zip(middles, found.values(), strict=True)]
    axes.errorbar(list(found), middles, yerr=[below, above], marker="o", markersize=4, capsize=3, label=label)


def main(
    run: Annotated[Path, typer.Argument(help="a file of docs/gpu-runs, or what over_starts.py -o writes")],
    picture: Annotated[Path, typer.Argument(help="PNG to write")],
) -> None:
    """Draw a run's figures against load."""
    read = json.loads(run.read_text(encoding="utf-8"))
    drawn = panels(read["figures"])
    if not drawn:
        raise typer.BadParameter(f"{run} has no figure of listeners, prompts or turns", param_hint="RUN")
    size = (4 * len(drawn), _HEIGHT)
    shown, every = plt.subplots(1, len(drawn), figsize=size, layout="constrained", squeeze=False)
    for axes, panel in zip(every[0], drawn, strict=True):
        for label, keys in panel.lines.items():
            if found := points(read["figures"], keys):
                draw(axes, found, label)
        axes.set(title=panel.title, xlabel=panel.across, ylabel=panel.up)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    if "versions" in read:
        shown.suptitle(f"{read['versions']['gpu']} · 7B-sized random weights · {read['date']}")
    shown.savefig(picture, dpi=90)


if __name__ == "__main__":
    typer.run(main)
