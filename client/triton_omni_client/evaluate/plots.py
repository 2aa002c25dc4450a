# SPDX-License-Identifier: Apache-2.0
"""Plots of an evaluation (PNG): figures with intervals, and mel spectrograms of a reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from triton_omni_client.audio import SAMPLE_RATE
from triton_omni_client.bench.plots import PlotError
from triton_omni_client.errors import BadRequest

from .asking import Answer
from .figures import KINDS
from .sound import mel_db
from .tables import COMPARED, Figures, is_apart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 150
_COLUMNS = 3
_MOST_REPLIES = 4
_RANGE_DB = 70
_USUAL, _APART = "#1f77b4", "#d62728"


def write_plots(
    settings: Mapping[str, Figures], replies: Mapping[str, Answer], folder: Path, subtitle: str
) -> list[Path]:
    """Write `figures.png`, and `replies.png` of up to four settings; returns the files.

    Args:
        settings: figures by setting.
        replies: a spoken reply by setting.
        folder: folder of the files.
        subtitle: origin of the figures.

    Raises:
        PlotError: matplotlib is not installed.
        BadRequest: a file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError("no plots: matplotlib is not installed (pip install matplotlib)") from error
    names = [name for name in COMPARED if any(name in figures for figures in settings.values())]
    written = []
    if names:
        rows = -(-len(names) // _COLUMNS)
        height = rows * (1.2 + 0.28 * len(settings))
        figure = Figure(figsize=(3.2 * _COLUMNS, height), dpi=_DPI, layout="constrained")
        for at, name in enumerate(names):
            _intervals(figure.add_subplot(rows, _COLUMNS, at + 1), name, settings)
        written.append(_save(figure, folder / "figures.png", subtitle))
    if replies:
        shown = list(replies.items())[:_MOST_REPLIES]
        figure = Figure(figsize=(7, 1.8 * len(shown)), dpi=_DPI, layout="constrained")
        for axes, (setting, answer) in zip(figure.subplots(len(shown), 1, squeeze=False)[:, 0], shown, strict=True):
            _spectrogram(axes, setting, answer)
        written.append(_save(figure, folder / "replies.png", subtitle))
    return written


def _intervals(axes: Axes, name: str, settings: Mapping[str, Figures]) -> None:
    """Draw value and interval of each setting; red = it can be told apart from the reference."""
    labels: Sequence[str] = list(settings)
    for at, figures in enumerate(settings.values()):
        if found := figures.get(name):
            colour = _APART if is_apart(found) else _USUAL
            low, high = (found["value"] if found[end] is None else found[end] for end in ("low", "high"))
            axes.plot([low, high], [at, at], color=colour)
            axes.plot(found["value"], at, color=colour, marker="o")
    axes.set_yticks(range(len(labels)), labels, parse_math=False)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_title(f"{KINDS[name].title}, {KINDS[name].unit}", fontsize="small")
    axes.grid(visible=True, color="0.9")
    axes.spines[["top", "right"]].set_visible(False)


def _spectrogram(axes: Axes, setting: str, answer: Answer) -> None:
    """Draw mel bands over time, with chunk boundaries."""
    picture = mel_db(answer.audio).T
    seconds = len(answer.audio) / SAMPLE_RATE
    top = picture.max()
    axes.imshow(picture, aspect="auto", origin="lower", extent=(0, seconds, 0, len(picture)), vmin=top - _RANGE_DB)
    for boundary in answer.boundaries:
        axes.axvline(boundary / SAMPLE_RATE, color="white", linewidth=0.5, linestyle=":")
    axes.set_title(f"{setting}: {answer.text}", fontsize="x-small", loc="left", parse_math=False)
    axes.set(xlabel="s", yticks=[])


def _save(figure: Figure, path: Path, subtitle: str) -> Path:
    figure.suptitle(subtitle, fontsize="x-small", color="0.35", x=0.01, ha="left", parse_math=False)
    try:
        figure.savefig(path)
    except OSError as error:
        raise BadRequest(f"{path}: cannot be written: {error.strerror}") from error
    return path
