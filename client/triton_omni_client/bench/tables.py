# SPDX-License-Identifier: Apache-2.0
"""The report on a terminal: a table a run, one that compares the runs, and the progress of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from triton_omni_client.printable import one_line

from .records import RequestRecord
from .report import Run
from .resources import Usage
from .statistics import PERCENTILES, Distribution
from .summary import Summary

MISSING = "-"
_SAID = 200
"""Characters of an error's message."""

Format = Callable[[float], str]


def milliseconds(seconds: float) -> str:
    """In milliseconds, with a decimal below 100."""
    value = seconds * 1000
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _plain(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}"


def _count(value: float) -> str:
    return f"{value:.0f}"


FIGURES: tuple[tuple[str, str, Format], ...] = (
    ("first text, ms", "time_to_first_text_s", milliseconds),
    ("first audio, ms", "time_to_first_audio_s", milliseconds),
    ("whole reply, ms", "latency_s", milliseconds),
    ("real-time factor", "real_time_factor", _plain),
    ("gap of chunks, ms", "audio_gap_s", milliseconds),
    ("silence, ms", "silence_per_request_s", milliseconds),
    ("gap of text, ms", "text_gap_s", milliseconds),
    ("text tokens/s", "text_tokens_per_s_per_request", _plain),
    ("speech, s", "audio_s", _plain),
    ("reply tokens", "reply_tokens", _count),
    ("prompt tokens", "prompt_tokens", _count),
)
SHOWN_BY_STAGE = ("memory_mib", "utilization", "sessions", "running", "waiting")
"""Figures of a stage in the table; the report has all."""


def run_table(run: Run) -> Table:
    """The distributions of one run; a percentile of too few samples is a dash."""
    table = _table(run.load.label + ("" if run.complete else " (cut short)"))
    for name in ("n", "mean", *(f"p{percent}" for percent in PERCENTILES), "max"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, name, form in FIGURES:
        figures: Distribution = getattr(run.summary, name)
        if figures.count:
            values = [figures.mean, *(getattr(figures, f"p{percent}") for percent in PERCENTILES), figures.max]
            table.add_row(label, str(figures.count), *(_shown(value, form) for value in values))
    return table


def _table(title: str, *, space: int = 1) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, space, 0, 0))
    table.add_column("", no_wrap=True)
    return table


def turn_table(run: Run) -> Table:
    """One line a turn of the run's conversations."""
    table = _table(f"{run.load.label} by turn, p50/p95")
    for name in ("replies", "errors", "prompt tokens, p50", "first text, ms", "first audio, ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for turn, summary in enumerate(run.by_turn, 1):
        table.add_row(
            f"turn {turn}",
            str(summary.completed),
            str(sum(summary.errors.values())),
            _shown(summary.prompt_tokens.p50, _count),
            _pair(summary.time_to_first_text_s, milliseconds),
            _pair(summary.time_to_first_audio_s, milliseconds),
        )
    return table


def run_lines(run: Run) -> list[str]:
    """Return the lines below one run's table."""
    summary = run.summary
    failed = summary.requests - summary.completed - summary.interrupted
    cut = f", {summary.interrupted} cut off" if summary.interrupted else ""
    is_told = run.load.mode == "open" and summary.sent_per_s is not None
    sent = f"; {_shown(summary.sent_per_s, _plain)} requests sent a second" if is_told else ""
    lines = [
        f"{summary.completed} replies, {failed} errors{cut} in {summary.duration_s:.1f} s{sent}",
        f"a second: {_shown(summary.audio_seconds_per_s, _plain)} s of speech · "
        f"{_shown(summary.requests_per_s, _plain)} replies · "
        f"{_shown(summary.text_tokens_per_s, _plain)} text tokens",
        _underruns(summary),
    ]
    if summary.errors:
        told = next((record.message for record in run.records if record.message and not record.warm_up), None)
        counts = ", ".join(f"{count} {code}" for code, count in summary.errors.items())
        lines.append(f"errors: {counts}" + (f"; the first: {told:.{_SAID}}" if told else ""))
    return lines + _hops(run) + _resources(run)


def comparison(runs: Sequence[Run]) -> Table:
    """One line a run."""
    table = _table("all runs, p50/p95", space=0)
    heads = ("errors", "first text\nms", "first audio\nms", "real-time\nfactor", "under-\nruns")
    for name in (*heads, "silence\n%", "speech\ns/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        summary = run.summary
        share = summary.silence_share
        table.add_row(
            run.load.label,
            str(sum(summary.errors.values())),
            _pair(summary.time_to_first_text_s, milliseconds),
            _pair(summary.time_to_first_audio_s, milliseconds),
            _pair(summary.real_time_factor, _plain),
            _shown(summary.underruns, _count),
            MISSING if share is None else f"{100 * share:.1f}",
            _shown(summary.audio_seconds_per_s, _plain),
        )
    return table


def print_report(console: Console, runs: Sequence[Run], notes: Sequence[str]) -> None:
    """Print the comparison of several runs, and the notes."""
    if len(runs) > 1:
        console.print(comparison(runs))
    for note in notes:
        console.print(f"note: {escape(one_line(note))}", style="dim", highlight=False)


def print_run(console: Console, run: Run) -> None:
    """One run: its table and the lines below."""
    console.print(run_table(run))
    if run.by_turn:
        console.print(turn_table(run))
    for line in run_lines(run):
        console.print(f"  {escape(one_line(line))}", highlight=False)
    console.print()


def _underruns(summary: Summary) -> str:
    if not summary.time_to_first_audio_s.count:
        return "no speech"
    if summary.underruns is None:
        return "whole replies: nothing is known of underruns"
    return (
        f"{summary.underruns} underruns in {summary.requests_with_underruns} of {summary.completed} replies · "
        f"{summary.silence_s:.2f} s of silence"
    )


def _hops(run: Run) -> list[str]:
    """A line for each stage that takes messages of another."""
    lines = []
    for stage, ends in run.hops.items():
        times = [f"{until} {_shown(took.p50_s, _fine)}/{_shown(took.p95_s, _fine)}" for until, took in ends.items()]
        lines.append(f"hops to {stage}, ms, p50/p95 until {' · '.join(times)}")
    return lines


def _fine(seconds: float) -> str:
    return f"{1000 * seconds:#.3g}".rstrip(".")


def _resources(run: Run) -> list[str]:
    """A line for each GPU and stage that something is known of."""
    owners: dict[str, list[str]] = {}
    for name, usage in run.resources.items():
        owner, _, figure = name.rpartition("/")
        if figure in SHOWN_BY_STAGE:
            owners.setdefault(owner, []).append(_usage(figure, usage))
    lines = [f"  {owner.replace('/', ' ')}: {' · '.join(figures)}" for owner, figures in owners.items()]
    return ["mean and peak of", *lines] if lines else []


def _usage(figure: str, usage: Usage) -> str:
    if figure == "utilization":
        return f"{100 * usage.mean:.0f} and {100 * usage.max:.0f} % busy"
    if figure == "memory_mib":
        return f"{usage.mean:.0f} and {usage.max:.0f} MiB"
    return f"{figure} {usage.mean:.1f} and {usage.max:.0f}"


def _pair(figures: Distribution, form: Format) -> str:
    return f"{_shown(figures.p50, form)}/{_shown(figures.p95, form)}"


def _shown(value: float | None, form: Format) -> str:
    return MISSING if value is None else form(value)


class RunProgress:
    """A bar of one run: how many have ended, how many are open, how many failed."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar = bar
        self._task = task
        self._open = self._failed = 0

    def started(self) -> None:
        """A request was sent."""
        self._open += 1
        self._show()

    def ended(self, record: RequestRecord) -> None:
        """A request has ended."""
        self._open -= 1
        self._failed += not record.ok
        self._bar.advance(self._task)
        self._show()

    def _show(self) -> None:
        failed = f" · {self._failed} failed" if self._failed else ""
        self._bar.update(self._task, state=f"{self._open} open{failed}")


@contextmanager
def progress(console: Console, title: str, requests: int) -> Iterator[RunProgress]:
    """Shows a bar while inside, on a terminal; nothing elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    state = TextColumn("{task.fields[state]}")
    with Progress(*columns, state, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield RunProgress(bar, bar.add_task(title, total=requests, state=""))
