# SPDX-License-Identifier: Apache-2.0
"""Time to first audio and real-time factor against the load, and the first against the turn of a conversation, as PNG.

Needs matplotlib, which is asked for late.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from triton_omni_client.errors import BadRequest

from .records import LoadMode
from .report import Run
from .summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES = {"p50": ("#1f77b4", "o", -14), "p95": ("#d62728", "s", 7)}
"""Colour and marker of each percentile, and how many points above the marker its figure stands."""
_ROOM = 0.12
"""Fraction of the axis left and right of the points, for the first and last labels."""
_ASIDE = 5
"""How many points beside the marker a figure stands which the line would otherwise touch."""
_ALIGNED = {-1: "right", 0: "center", 1: "left"}
"""Horizontal alignment of a figure left of its marker, at it, and right of it."""


class Panel(NamedTuple):
    """One plot of a run's summary."""

    figure: str
    title: str
    factor: float
    """From the figure's unit to the plot's."""
    unit: str

    @property
    def slug(self) -> str:
        """The title in the name of a file."""
        return self.title.lower().replace(" ", "-")


class Point(NamedTuple):
    """Figures at one place of the horizontal axis: at a load, or in a turn."""

    at: float
    summary: Summary


PANELS = (
    Panel("time_to_first_audio_s", "Time to first audio", 1000, "time to first audio, ms"),
    Panel("real_time_factor", "Real-time factor", 1, "seconds of waiting a second of speech"),
)
AXES: dict[LoadMode, str] = {"closed": "concurrency (requests at once)", "open": "rate (requests a second)"}
_DPI = 150
_LOG_FROM = 4
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""


class PlotError(Exception):
    """There is nothing to draw with."""


def write_plots(runs: Sequence[Run], stem: Path, subtitle: str) -> list[Path]:
    """Write `<stem>-<figure>-<mode>.png` for each figure and each mode of load that has runs, and for each run of
    conversations `<stem>-<figure>-turns-<places>.png`; returns the files.

    Raises:
        PlotError: matplotlib is not installed.
        BadRequest: a file cannot be written.
    """
    plots: list[tuple[str, Panel, str, list[Point]]] = []
    for mode, axis in AXES.items():
        of_mode = sorted((run for run in runs if run.load.mode == mode), key=lambda run: run.load.value)
        points = [Point(run.load.value, run.summary) for run in of_mode]
        plots += [(f"{panel.slug}-{mode}", panel, axis, points) for panel in PANELS]
    for run in runs:
        points = [Point(turn, summary) for turn, summary in enumerate(run.by_turn, 1)]
        title = f"turn of the conversation, {run.load.label}"
        plots.append((f"{PANELS[0].slug}-turns-{run.load.value:g}", PANELS[0], title, points))
    written = []
    for name, panel, axis, points in plots:
        if any(getattr(point.summary, panel.figure).count for point in points):
            path = stem.with_name(f"{stem.name}-{name}.png")
            _draw(points, axis, panel, subtitle, path)
            written.append(path)
    return written


def _draw(points: Sequence[Point], axis: str, panel: Panel, subtitle: str, path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError("no plots: matplotlib is not installed (pip install matplotlib)") from error
    figure = Figure(figsize=(7, 4.5), dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    heights = [height for line in LINES for height in _line(axes, points, panel, line)]
    if panel.figure == "real_time_factor":
        axes.axhline(1, color="0.4", linestyle="--", linewidth=1, label="as fast as speech")
        heights.append(1)
    _scale(axes, [point.at for point in points], heights)
    axes.set(xlabel=axis, ylabel=panel.unit)
    axes.set_title(f"{panel.title}\n", loc="left", fontweight="bold")
    # The server's names are no formulas.
    axes.text(0, 1.03, subtitle, transform=axes.transAxes, fontsize="small", color="0.35", parse_math=False)
    axes.grid(visible=True, color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    try:
        figure.savefig(path)
    except OSError as error:
        raise BadRequest(f"{path}: cannot be written: {error.strerror}") from error


def _line(axes: Axes, points: Sequence[Point], panel: Panel, name: str) -> list[float]:
    """Draw one percentile over the loads or turns that have it; returns its heights."""
    colour, marker, above = LINES[name]
    found = [(point.at, getattr(getattr(point.summary, panel.figure), name)) for point in points]
    drawn = [(at, height * panel.factor) for at, height in found if height is not None]
    if not drawn:
        axes.plot([], [], color=colour, marker=marker, label=f"{name}: too few replies")
        return []
    places, heights = zip(*drawn, strict=True)
    axes.plot(places, heights, color=colour, marker=marker, label=name)
    for at, (place, height) in enumerate(drawn):
        figure = f"{height:.3g}" if height < 1000 else f"{height:.0f}"
        side = free_side(heights, at, above)
        offset, align = (side * _ASIDE, above), _ALIGNED[side]
        axes.annotate(figure, (place, height), offset, textcoords="offset points", ha=align, color=colour)
    return list(heights)


def free_side(heights: Sequence[float], at: int, above: int) -> int:
    """Where a figure above or below its marker is clear of the line: left (-1), right (1), or in the middle (0).

    The first stands left and the last right, those between away from the neighbour that lies further on the figure's
    own side: the line to that one is in its way.
    """
    last = len(heights) - 1
    if at in (0, last):
        return int(at > 0) - int(at < last)
    before, after = (max(0.0, (heights[neighbour] - heights[at]) * above) for neighbour in (at - 1, at + 1))
    return int(before > after) - int(before < after)


def _scale(axes: Axes, loads: Sequence[float], heights: Sequence[float]) -> None:
    """Ticks at the loads or turns; logarithmic where values lie far apart, but for turns, which follow each other."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if _far_apart(loads) and list(loads) != list(range(1, len(loads) + 1)):
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.margins(x=_ROOM)
    axes.set_xticks(list(loads), [f"{load:g}" for load in loads])
    if _far_apart(heights):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(min(heights) / 1.5, max(heights) * 1.5)
    elif heights:
        axes.set_ylim(0, max(heights) * 1.15)


def _far_apart(values: Sequence[float]) -> bool:
    return len(values) > 1 and min(values) > 0 and max(values) / min(values) >= _LOG_FROM
