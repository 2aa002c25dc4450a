# SPDX-License-Identifier: Apache-2.0
"""The benchmark's output: JSON, tables, plots. The document names every key of the JSON."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from triton_omni_client.bench import plots
from triton_omni_client.bench.plots import PlotError, free_side, write_plots
from triton_omni_client.bench.records import INTERRUPTED, Chunk, Load, RequestRecord
from triton_omni_client.bench.report import SCHEMA, SCHEMA_VERSION, Report, Run
from triton_omni_client.bench.resources import Usage
from triton_omni_client.bench.tables import print_report, print_run, progress
from triton_omni_client.errors import BadRequest

ROOT = Path(__file__).parents[2]
RECORD = RequestRecord(
    index=0,
    start_s=0.0,
    sent_s=0.0,
    end_s=1.0000004,
    text_at_s=(0.1, 0.2),
    chunks=(Chunk(0.25, 0.5), Chunk(1.0, 0.5)),
    prompt_tokens=7,
    reply_tokens=10,
    finish_reason={"thinker": "stop"},
)
USAGE = {
    "gpu/0/memory_mib": Usage(70.0, 80.4),
    "gpu/0/utilization": Usage(0.5, 0.75),
    "stage/talker/memory_mib": Usage(30.0, 32.0),
    "stage/talker/sessions": Usage(1.5, 4.0),
    "stage/talker/outbox": Usage(1.0, 2.0),
}


def records(count: int) -> list[RequestRecord]:
    return [replace(RECORD, index=index, start_s=float(index), sent_s=float(index)) for index in range(count)]


def run_of(load: Load, count: int = 20, **options: Any) -> Run:
    return Run(load, records(count), **options)


def printed(*runs: Run, notes: tuple[str, ...] = ()) -> str:
    out = io.StringIO()
    console = Console(file=out, width=80)
    for run in runs:
        print_run(console, run)
    print_report(console, runs, notes)
    return out.getvalue()


def test_the_report_is_json_of_a_named_schema(tmp_path: Path) -> None:
    run = Run(Load("closed", 4), records(3)[::-1], USAGE, complete=False, client_lag_s=0.001)
    report = Report({"date": "2026-01-01"}, {"seed": 0}, [run], ["nothing is missing"])
    path = tmp_path / "r.json"
    report.write(path)
    found = json.loads(path.read_text(encoding="utf-8"))
    assert (found["schema"], found["schema_version"]) == (SCHEMA, SCHEMA_VERSION)
    assert (found["environment"], found["workload"], found["notes"]) == (
        {"date": "2026-01-01"},
        {"seed": 0},
        ["nothing is missing"],
    )
    (written,) = found["runs"]
    assert written["load"] == {"mode": "closed", "value": 4}
    assert (written["complete"], written["client_lag_s"]) == (False, 0.001)
    assert written["resources"]["gpu/0/utilization"] == {"mean": 0.5, "max": 0.75}
    assert [request["index"] for request in written["requests"]] == [0, 1, 2]
    first = written["requests"][0]
    assert (first["end_s"], first["chunks"]) == (1.0, [[0.25, 0.5], [1.0, 0.5]])  # to the microsecond
    assert (first["metrics"]["underruns"], first["metrics"]["silence_s"]) == (1, 0.25)
    assert written["summary"]["latency_s"]["count"] == 3
    assert written["summary"]["latency_s"]["p99"] is None


def test_a_report_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="cannot be written"):
        Report({}, {}).write(tmp_path / "none" / "r.json")


def test_the_document_names_every_key_of_the_report() -> None:
    text = (ROOT / "client" / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_0-9]+)`", text))
    written = Report({}, {}, [run_of(Load("closed", 1), 1)]).to_json()
    (run,) = written["runs"]
    (request,) = run["requests"]
    keys = {*written, *run, *run["load"], *run["summary"], *run["summary"]["latency_s"], *request, *request["metrics"]}
    assert keys - named == set()
    assert f"`schema_version` {SCHEMA_VERSION}" in text


def test_a_table_has_a_dash_where_there_are_too_few_replies() -> None:
    found = printed(run_of(Load("closed", 4)))
    (line,) = [line for line in found.splitlines() if line.strip().startswith("first audio")]
    assert line.split()[3:] == ["20", "250", "250", "250", "250", "-", "250"]
    assert "20 replies, 0 errors in 20.0 s" in found
    assert "20 underruns in 20 of 20 replies · 5.00 s of silence" in found


def test_a_table_says_what_failed_and_what_was_cut_off() -> None:
    failed = [replace(RECORD, error="overloaded"), replace(RECORD, error=INTERRUPTED)]
    found = printed(Run(Load("open", 2.0), [*records(2), *failed], USAGE, complete=False))
    assert "rate 2/s (cut short)" in found
    assert "2 replies, 1 errors, 1 cut off" in found
    assert "errors: 1 overloaded" in found
    assert "gpu 0: 70 and 80 MiB · 50 and 75 % busy" in found
    assert "stage talker: 30 and 32 MiB · sessions 1.5 and 4" in found
    assert "outbox" not in found


def test_an_open_loop_tells_the_rate_that_came_about() -> None:
    assert "20 replies, 0 errors in 20.0 s; 1.00 requests sent a second" in printed(run_of(Load("open", 2.0)))
    assert "sent a second" not in printed(run_of(Load("closed", 2)))


def test_replies_in_one_piece_are_not_praised_for_their_silence() -> None:
    found = printed(*(run_of(Load("closed", at), streamed=False) for at in (1, 2)))
    assert "whole replies: nothing is known of underruns" in found
    assert "silence, ms" not in found
    (line,) = [line for line in found.splitlines() if line.strip().startswith("concurrency 2") and "/" in line]
    assert line.split()[6:8] == ["-", "-"]


def test_runs_are_compared_in_eighty_columns() -> None:
    found = printed(
        run_of(Load("closed", 1)), run_of(Load("closed", 32)), run_of(Load("open", 0.5)), notes=("a [note]",)
    )
    assert "…" not in found
    assert max(len(line) for line in found.splitlines()) <= 80
    (line,) = [line for line in found.splitlines() if line.strip().startswith("concurrency 32") and "/" in line]
    assert line.split()[2:] == ["0", "100/100", "250/250", "1.00/1.00", "20", "25.0", "1.00"]
    assert "note: a [note]" in found


def test_replies_of_text_alone_say_so() -> None:
    found = printed(Run(Load("closed", 1), [replace(RECORD, chunks=())]))
    assert "no speech" in found
    assert "first audio" not in found


def test_progress_counts_what_is_open_and_failed() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with progress(console, "concurrency 2", 3) as bar:
        bar.started()
        bar.started()
        bar.ended(RECORD)
        bar.ended(replace(RECORD, error="internal"))
        bar.started()
    assert "2/3" in out.getvalue()
    assert "1 open · 1 failed" in out.getvalue()


def test_plots_are_written_for_each_kind_of_load(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [run_of(Load("closed", 1)), run_of(Load("closed", 32), 5), run_of(Load("open", 2.0))]
    written = write_plots(runs, tmp_path / "bench", "a GPU")
    assert sorted(path.name for path in written) == [
        "bench-real-time-factor-closed.png",
        "bench-real-time-factor-open.png",
        "bench-time-to-first-audio-closed.png",
        "bench-time-to-first-audio-open.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


@pytest.mark.parametrize(
    ("heights", "below", "above"),
    [
        ([1.0], [0], [0]),
        ([1.0, 2.0, 3.0], [-1, 1, 1], [-1, -1, 1]),
        ([3.0, 2.0, 1.0], [-1, -1, 1], [-1, 1, 1]),
        ([1.0, 5.0, 4.0], [-1, 1, 1], [-1, 0, 1]),
    ],
    ids=["alone", "rising", "falling", "a peak"],
)
def test_a_figure_stands_where_the_line_does_not_pass(heights: list[float], below: list[int], above: list[int]) -> None:
    sides = [[free_side(heights, at, height) for at in range(len(heights))] for height in (-14, 7)]
    assert sides == [below, above]


@pytest.mark.parametrize(("places", "scale"), [(range(1, 11), "linear"), ((1, 2), "linear"), ((1, 8, 32), "log")])
def test_turns_stand_in_equal_steps_and_loads_far_apart_do_not(places: Sequence[int], scale: str) -> None:
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
    plots._scale(axes, places, [200.0, 300.0])
    assert axes.get_xscale() == scale
    assert list(axes.get_xticks()) == list(places)


def test_nothing_is_plotted_of_text_alone(tmp_path: Path) -> None:
    assert write_plots([Run(Load("closed", 1), [replace(RECORD, chunks=())])], tmp_path / "b", "") == []


@pytest.mark.parametrize("name", ["$\\planted$", "cost $1 {$}", "$x_{$"])
def test_a_name_of_the_server_is_no_formula_of_a_plot(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    assert write_plots([run_of(Load("closed", 1))], tmp_path / "b", name)


def test_a_plot_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(BadRequest, match="cannot be written"):
        write_plots([run_of(Load("closed", 1))], tmp_path / "none" / "b", "")


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotError, match="pip install matplotlib"):
        write_plots([run_of(Load("closed", 1))], tmp_path / "b", "")
