# SPDX-License-Identifier: Apache-2.0
"""Prints a sample of a server as a table in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from triton_omni.core.errors import StageName
from triton_omni.doctor.diagnosis import Sample
from triton_omni.session.ledger_table import STAGES
from triton_omni.session.ledger_view import StageView

_FIGURES = {
    "sessions": "sessions",
    "running": "running",
    "waiting": "waiting",
    "kv_blocks_used": "KV",
    "rows_used": "rows",
    "outbox": "outbox",
    "leaked_sessions": "leaked",
}

_TABLE_WIDTH = 110


def print_report(out: Console, name: str, metrics_url: str, sample: Sample) -> None:
    """Print one server's stages, and its sessions in a line."""
    out.print(f"{name}, metrics {metrics_url or 'off'}", highlight=False, markup=False)
    table = Table(box=None, pad_edge=False)
    for column in ("stage", "process", "starts", "silent", "open", *_FIGURES.values()):
        table.add_column(column, no_wrap=True, justify="left" if column == "stage" else "right")
    for stage in STAGES:
        table.add_row(stage, *_of_ledger(stage, sample), *(_told(sample.figure(figure, stage)) for figure in _FIGURES))
    # A terminal that is too narrow breaks lines; figures that are cut off would be of no use.
    out.width = max(out.width, _TABLE_WIDTH)
    out.print(table, crop=False)
    out.print(_sessions(sample), highlight=False, markup=False)


def _of_ledger(stage: StageName, sample: Sample) -> tuple[str, str, str, str]:
    if sample.ledger is None:
        return "?", "?", "?", "?"
    view = sample.ledger.stages[stage]
    return _process(view), str(view.epoch), f"{view.silent_s:.1f} s", str(len(sample.may_hold[stage]))


def _process(view: StageView) -> str:
    if view.lost or not view.runs:
        return f"{view.pid} gone" if view.pid else "none"
    return f"{view.pid} broken" if view.broken else str(view.pid)


def _told(value: int | None) -> str:
    """A figure, or a dash where the stage has published none."""
    return "-" if value is None else str(value)


def _sessions(sample: Sample) -> str:
    limit, taken = sample.figure("sessions_limit", "thinker"), sample.held("sessions", "thinker")
    free = (
        "the thinker has published no figures since it was loaded: stages do so from their first request on"
        if limit is None
        else f"{max(0, limit - taken)} of {limit} slots free"
    )
    if sample.ledger is None:
        return free
    oldest = max((session.age_s for session in sample.ledger.sessions), default=None)
    age = "" if oldest is None else f", the oldest for {oldest:.1f} s"
    return f"{len(sample.ledger.sessions)} sessions open{age}; {free}"
