# SPDX-License-Identifier: Apache-2.0
"""Draws first audio against length of the prompt, listeners and turns, from a run under docs/gpu-runs.

`python scripts/plot_run.py docs/gpu-runs/2026-11-28-b.json docs/images/first-audio.png`; it needs matplotlib.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import typer

mpl.use("Agg")
from matplotlib import pyplot as plt

STATES = {"balanced": "as shipped", "balanced-cached": "prefix_caching"}
Points = dict[float, list[float]]


def points(figures: dict[str, Any], kind: str, load: str) -> Points:
    """Values in milliseconds by the number in a load's name, which `load`, a regular expression, has as a group.

    Args:
        figures: of a run, by keys such as `first_audio/7b/balanced/turn-1`.
        kind: first two parts and the state of the key, as in `first_audio/7b/balanced`.
        load: of the last part.
    """
    found: Points = {}
    for key, figure in figures.items():
        before, _, name = key.rpartition("/")
        if before == kind and (match := re.fullmatch(load, name)):
            found[float(match[1].replace("k", "000"))] = figure["values"]
    return dict(sorted(found.items()))


def draw(axes: Any, found: Points, label: str) -> None:
    """A line through the medians, and a bar over the range of each."""
    middles = [statistics.median(values) for values in found.values()]
    below = [middle - min(values) for middle, values in zip(middles, found.values(), strict=True)]
    above = [max(values) - middle for middle, values in zip(middles, found.values(), strict=True)]
    axes.errorbar(list(found), middles, yerr=[below, above], marker="o", markersize=4, capsize=3, label=label)


def main(
    run: Annotated[Path, typer.Argument(help="a file of docs/gpu-runs with prompts, conversations and listeners")],
    picture: Annotated[Path, typer.Argument(help="PNG to write")],
) -> None:
    """Draw a run's first audio against load."""
    read = json.loads(run.read_text(encoding="utf-8"))
    figures = read["figures"]
    shown, (prompts, turns, together, listeners) = plt.subplots(1, 4, figsize=(16, 3.8), layout="constrained")
    for state, label in STATES.items():
        draw(prompts, points(figures, f"first_audio/7b/{state}", r"prompt-(\d+k?)"), label)
        draw(turns, points(figures, f"first_audio/7b/{state}", r"turn-(\d+)"), label)
        draw(together, points(figures, f"first_audio_p95/7b/{state}", r"32-conversations-turn-(\d+)"), label)
    for quantile in ("p50", "p95"):
        draw(listeners, points(figures, f"first_audio_{quantile}/7b/balanced", r"(\d+)-listeners-short"), quantile)
    titles = {
        prompts: ("one request", "tokens of the prompt"),
        turns: ("one conversation", "turn"),
        together: ("32 conversations at once, p95", "turn"),
        listeners: ("listeners of 6 s replies", "listeners"),
    }
    for axes, (title, of) in titles.items():
        axes.set(title=title, xlabel=of, ylabel="first audio, ms")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    shown.suptitle(f"{read['versions']['gpu']} · 7B-sized random weights · {read['date']}")
    shown.savefig(picture, dpi=90)


if __name__ == "__main__":
    typer.run(main)
