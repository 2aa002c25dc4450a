# SPDX-License-Identifier: Apache-2.0
"""Counters of a run in the report of bench, and the tables of `scripts/stage_time.py`."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from triton_omni_client.bench.counters import counted, parse_counters
from triton_omni_client.bench.records import Load, RequestRecord
from triton_omni_client.bench.report import Report, Run

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "stage_time.py"))
BEFORE = """
omni_loop_seconds_total{doing="step",stage="talker"} 1.5
omni_loop_seconds_total{doing="claim",stage="talker"} 2
omni_batch_size_count{stage="talker"} 10
omni_batch_size_sum{stage="talker"} 40
omni_codes_total{stage="talker"} 7
omni_waiting{stage="talker"} 3
nv_inference_count{model="talker"} 9
"""
AFTER = """
omni_loop_seconds_total{doing="step",stage="talker"} 4
omni_loop_seconds_total{doing="claim",stage="talker"} 2
omni_loop_seconds_total{doing="device",stage="token2wav"} 0.5
omni_loop_seconds_total{doing="idle",stage="token2wav"} 2
omni_window_seconds_count{kind="first",stage="token2wav"} 4
omni_window_seconds_sum{kind="first",stage="token2wav"} 0.4
omni_window_seconds_count{kind="whole",stage="token2wav"} 1
omni_window_seconds_sum{kind="whole",stage="token2wav"} 0.05
omni_window_phase_seconds_total{kind="first",phase="wait",stage="token2wav"} 0.2
omni_window_phase_seconds_total{kind="first",phase="device",stage="token2wav"} 1.6
omni_window_phase_seconds_total{kind="whole",phase="device",stage="token2wav"} 0.05
omni_window_phase_seconds_total{kind="whole",phase="turn",stage="token2wav"} 0.025
omni_batch_size_count{stage="talker"} 30
omni_batch_size_sum{stage="talker"} 100
omni_codes_total{stage="talker"} 67
"""
COUNTED = {
    "talker": {"batch_size_count": 20, "batch_size_sum": 60, "codes": 60, "loop_seconds/step": 2.5},
    "token2wav": {
        "loop_seconds/device": 0.5,
        "loop_seconds/idle": 2,
        "window_phase_seconds/first/device": 1.6,
        "window_phase_seconds/first/wait": 0.2,
        "window_phase_seconds/whole/device": 0.05,
        "window_phase_seconds/whole/turn": 0.025,
        "window_seconds_count/first": 4,
        "window_seconds_count/whole": 1,
        "window_seconds_sum/first": 0.4,
        "window_seconds_sum/whole": 0.05,
    },
}

RESTED = {"loop_seconds/step": 4, "loop_seconds/idle": 3}


def test_counters_are_told_by_stage_as_they_grew() -> None:
    assert counted(parse_counters(BEFORE), parse_counters(AFTER)) == COUNTED


def write(path: Path, run: Run) -> Path:
    Report({}, {}, [run]).write(path)
    return path


def test_each_second_of_a_stage_has_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [
        RequestRecord(index=0, start_s=1, sent_s=1, end_s=2),
        RequestRecord(index=1, start_s=2, sent_s=2, end_s=0.5),
    ]
    report = write(tmp_path / "bench.json", Run(Load("closed", 32), records, counters=COUNTED))
    SCRIPT["main"]([report])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows[1:] == [
        ["step", "0.00", "2.50", "0.00"],
        ["device", "0.00", "0.00", "0.50"],
        ["idle", "0.00", "0.00", "1.50"],
        ["remainder", "2.00", "-0.50", "0.00"],
        ["the load", "2.00", "2.00", "2.00"],
        ["windows on the GPU", "0.00", "0.00", "0.45"],
        ["steps, batches", "0", "20", "0"],
        ["sequences a step", "-", "3.0", "-"],
        ["GPU, %", "-", "-", "-"],
        ["windows", "number", "seconds", "ms a window", "wait, ms", "turn, ms", "device, ms"],
        ["first", "4", "0.40", "100.0", "50.0", "0.0", "400.0"],
        ["whole", "1", "0.05", "50.0", "0.0", "25.0", "50.0"],
        ["all", "5", "0.45", "90.0", "40.0", "5.0", "330.0"],
    ]


def test_rest_outside_the_load_is_not_idle_and_work_there_is_told() -> None:
    seconds = SCRIPT["loop_seconds"]
    assert {doing: passed for doing, passed in seconds(RESTED, 5).items() if passed} == {"step": 4, "idle": 1}
    assert seconds({"loop_seconds/step": 7, "loop_seconds/idle": 1}, 5)["remainder"] == -2
    assert seconds({"loop_seconds/step": 4}, 5)["remainder"] == 1


def test_a_report_without_counters_is_refused(tmp_path: Path) -> None:
    report = write(tmp_path / "bench.json", Run(Load("closed", 1), []))
    assert json.loads(report.read_text())["runs"][0]["counters"] == {}
    with pytest.raises(SystemExit, match="--metrics-url"):
        SCRIPT["main"]([report])
    with pytest.raises(SystemExit, match="--metrics-url"):
        list(SCRIPT["tables"]({"runs": [{}]}))
