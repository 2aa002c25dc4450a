# SPDX-License-Identifier: Apache-2.0
"""Plots of an evaluation (PNG): figures with intervals, and mel spectrograms of replies; or that of one reply alone."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from triton_omni_client.audio import SAMPLE_RATE, Waveform
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
_ONE_REPLY = (9.0, 2.6)
"""Width and height in inches."""
_LONGEST_TITLE = 150
"""Letters of a reply that stand in one line."""
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
            _spectrogram(axes, f"{setting}: {answer.text}", answer.audio, answer.boundaries)
        written.append(_save(figure, folder / "replies.png", subtitle))
    return written


def write_spectrogram(samples: Waveform, text: str, path: Path) -> None:
    """Write the mel spectrogram of one reply, below its text.

    Raises:
        PlotError: matplotlib is not installed.
        BadRequest: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError("no spectrogram: matplotlib is not installed (pip install matplotlib)") from error
    figure = Figure(figsize=_ONE_REPLY, dpi=_DPI, layout="constrained")
    _spectrogram(figure.subplots(), textwrap.shorten(text, _LONGEST_TITLE, placeholder=" …"), samples, ())
    _save(figure, path, "")


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


def _spectrogram(axes: Axes, title: str, samples: Waveform, boundaries: Sequence[int]) -> None:
    """Draw mel bands over time, with chunk boundaries; nothing of speech below one window."""
    picture = mel_db(samples).T
    seconds = len(samples) / SAMPLE_RATE
    if picture.size:
        low = picture.max() - _RANGE_DB
        axes.imshow(picture, aspect="auto", origin="lower", extent=(0, seconds, 0, len(picture)), vmin=low)
    for boundary in boundaries:
        axes.axvline(boundary / SAMPLE_RATE, color="white", linewidth=0.5, linestyle=":")
    axes.set_title(title, fontsize="x-small", loc="left", parse_math=False)
    axes.set(xlabel="s", yticks=[])


def _save(figure: Figure, path: Path, subtitle: str) -> Path:
    figure.suptitle(subtitle, fontsize="x-small", color="0.35", x=0.01, ha="left", parse_math=False)
    try:
        figure.savefig(path)
    except OSError as error:
        raise BadRequest(f"{path}: cannot be written: {error.strerror}") from error
    return path
