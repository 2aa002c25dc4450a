# SPDX-License-Identifier: Apache-2.0
"""Tables of an evaluation: all figures of two settings, or the main figures of many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from triton_omni_client.printable import one_line

from .figures import KINDS

Figures = Mapping[str, Mapping[str, Any]]
"""Figures by name, as the report has them."""

APART = "*"
COMPARED = ("word_errors", "skipped_words", "mel_distance", "snr", "boundary_excess", "clicks", "reference_clicks")
"""Figures that settings of the speech stages change."""
_MOST_COLUMNS = 2


def print_report(console: Console, settings: Mapping[str, Figures], notes: Sequence[str]) -> None:
    """Print the figures of settings by name, and the notes."""
    if len(settings) > _MOST_COLUMNS:
        console.print(compared(settings))
    else:
        console.print(_whole(settings))
    for note in notes:
        console.print(f"note: {escape(one_line(note))}", style="dim", highlight=False)


def compared(settings: Mapping[str, Figures]) -> Table:
    """Return a table of one line a setting, with the figures of speech."""
    table = _table(settings)
    table.add_column("setting", min_width=16, overflow="fold")
    for name in COMPARED:
        table.add_column(f"{KINDS[name].title}\n{KINDS[name].unit}", justify="right")
    for setting, figures in settings.items():
        table.add_row(escape(setting), *(_shown(figures.get(name), "\n") for name in COMPARED))
    return table


def _whole(settings: Mapping[str, Figures]) -> Table:
    """Return a table of one line a figure and one column a setting."""
    table = _table(settings)
    table.add_column("", no_wrap=True)
    for setting in settings:
        table.add_column(escape(setting), justify="right", no_wrap=True)
    for name, kind in KINDS.items():
        if any(name in figures for figures in settings.values()):
            table.add_row(f"{kind.title}, {kind.unit}", *(_shown(each.get(name)) for each in settings.values()))
    return table


def _table(settings: Mapping[str, Figures]) -> Table:
    some_apart = any(is_apart(each) for figures in settings.values() for each in figures.values())
    caption = f"{APART} can be told apart from the reference (95 % of resampled replies)" if some_apart else None
    return Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")


def is_apart(figure: Mapping[str, Any]) -> bool:
    """Return True if a figure can be told apart from the reference's."""
    difference = figure.get("difference")
    return difference is not None and bool(difference["apart"])


def _shown(figure: Mapping[str, Any] | None, between: str = " ") -> str:
    if figure is None:
        return "-"
    text = f"{figure['value']:.3g}" + APART * is_apart(figure)
    if figure["low"] is not None:
        text += f"{between}({_brief(figure['low'])} to {_brief(figure['high'])})"
    return text


def _brief(value: float) -> str:
    """Return a number with two digits, or as a whole number."""
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.2g}"


@contextmanager
def progress(console: Console, title: str, steps: int) -> Iterator[Callable[[], None]]:
    """Show a bar on a terminal, and nothing elsewhere; the caller calls the given function after each step."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(escape(title), total=steps)
        yield lambda: bar.advance(task)
