# SPDX-License-Identifier: Apache-2.0
"""Median and range over starts and runs, from reports of bench."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import typer

from triton_omni_client.bench.records import Chunk, Load, RequestRecord
from triton_omni_client.bench.report import Report, Run

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "over_starts.py"))


def answered(index: int, first_s: float, gap_s: float = 0.1) -> RequestRecord:
    chunks = [Chunk(first_s, 1.0), Chunk(first_s + gap_s, 1.0)]
    return RequestRecord(index=index, start_s=0.0, sent_s=0.0, end_s=first_s + gap_s, chunks=chunks)


def write(path: Path, *records: RequestRecord) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Report({}, {}, [Run(Load("closed", 1), records)]).write(path)


def test_starts_and_runs_are_put_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first" / "caches", tmp_path / "second" / "caches"
    write(first / "plain.1" / "one.1.json", answered(0, 0.146), answered(1, 0.146))
    write(first / "plain.1" / "one.2.json", answered(0, 0.147), answered(1, 0.147))
    write(first / "shipped.1" / "one.1.json", answered(0, 0.150), answered(1, 0.150))
    write(second / "plain.2" / "one.1.json", answered(0, 0.150, gap_s=3.0), answered(1, 0.150))
    for places in (128, 96):
        write(first / "plain.1" / f"listeners-{places}.json", answered(0, 0.2))
    SCRIPT["main"]([first, second], tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert figures["first_audio_p50/plain/one"] == {"values": [146.0, 147.0, 150.0], "unit": "ms", "part": "caches"}
    assert figures["replies_without_underrun/plain/one"]["values"] == [2, 2, 1]
    assert figures["requests/plain/one"]["values"] == [2, 2, 2]
    assert figures["share_without_underrun/plain/one"]["values"] == [1, 1, 0.5]
    assert figures["silence/plain/one"] == {"values": [0, 0, 2.0], "unit": "s", "part": "caches"}
    assert figures["silence_per_reply/plain/one"]["values"] == [0, 0, 1.0]
    assert "first_text_p50/plain/one" not in figures
    assert figures["requests/plain/listeners-128"]["values"] == [1]
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    columns = rows[0].index("first_audio_p50")
    assert [row[0] for row in rows[2:]] == ["listeners-96", "listeners-128", "one", "one"]
    assert {row[1]: row[columns] for row in rows[4:]} == {"plain": "147.0 (146.0 to 150.0)", "shipped": "150.0"}


def test_both_hops_are_one_handover(tmp_path: Path) -> None:
    path = tmp_path / "numbers" / "7b" / "one.1.json"
    write(path, answered(0, 0.146), answered(1, 0.146))
    report = json.loads(path.read_text())
    report["runs"][0]["hops"] = {
        "talker": {"arrived": {"p50_s": 0.00024}},
        "token2wav": {"arrived": {"p50_s": 0.00028}},
    }
    path.write_text(json.dumps(report))
    assert SCRIPT["figures"]([path])["handover_p50/7b/one"] == [0.52]
    report["runs"][0]["hops"]["talker"]["arrived"]["p50_s"] = None
    path.write_text(json.dumps(report))
    assert "handover_p50/7b/one" not in SCRIPT["figures"]([path])


def test_stages_alone_are_put_beside_what_was_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "numbers" / "7b" / "7b" / "one.1.json", answered(0, 0.146), answered(1, 0.146))
    alone = tmp_path / "numbers" / "alone" / "7b"
    alone.mkdir(parents=True)
    step = {"name": "thinker_step", "parameters": {"batch": 1, "mode": "sampled"}, "ratio": 0.7629}
    greedy = {**step, "parameters": {"batch": 1, "mode": "greedy"}, "ratio": 0.9}
    window = {"name": "token2wav_window_dit", "parameters": {"batch": 1, "solver": "rk4"}, "p50": 22.574}
    took = [{**each, "by": by, "p50": ms} for each, by, ms in ((step, "vllm", 5.1), (step, "triton-omni", 3.894))]
    presets = {"reference": {"solver": "rk4", "evaluations": 36}, "fast": {"solver": "rk4", "evaluations": 12}}
    rates = [
        {
            "name": "token2wav_throughput",
            "parameters": {"batch": batch, "windows": windows, "preset": preset, **flow},
            "p50": batch + more + rate,
        }
        for windows, more in (("small", 3), ("regular", 6))
        for batch in (8, 32)
        for rate, (preset, flow) in enumerate(presets.items())
    ]
    for run in (1, 2):
        (alone / f"steps.{run}.json").write_text(json.dumps({"figures": took, "ratios": [greedy, step]}))
        (alone / f"window.{run}.json").write_text(json.dumps({"figures": [window, *rates], "ratios": []}))
    SCRIPT["main"]([tmp_path / "numbers"], tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    ratio = {"values": [0.763, 0.763], "unit": "1", "part": "numbers"}
    assert figures["thinker_step_ratio_sampled/7b/steps"] == ratio
    assert figures["window_dit/7b/window"] == {"values": [22.57, 22.57], "unit": "ms", "part": "numbers"}
    assert figures["first_audio_p50/7b/one"]["part"] == "numbers"
    assert figures["thinker_step_sampled/7b/steps"] == {"values": [3.89, 3.89], "unit": "ms", "part": "numbers"}
    speech = {
        f"{shape}windows_speech_per_second_{preset}": {"values": [rate, rate], "unit": "s", "part": "numbers"}
        for shape, preset, rate in (
            ("", "reference", 35.0),
            ("", "fast", 36.0),
            ("regular_", "reference", 38.0),
            ("regular_", "fast", 39.0),
        )
    }
    assert speech == {name: figures[f"{name}/7b/window"] for name in speech}
    assert "0.763 (0.763 to 0.763)" in capsys.readouterr().out


def test_memory_is_put_together_over_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for start, together in ((1, 54.46), (2, 54.62)):
        folder = tmp_path / "memory" / "7b" / f"shipped-7b.{start}"
        write(folder / "one.json", answered(0, 0.146), answered(1, 0.146))
        gib = {"thinker": 24.0, "talker": 8.0, "token2wav": 6.0, "other": 1.0, "together": together}
        (folder / "resident.json").write_text(json.dumps({"resident": gib}))
    SCRIPT["main"]([tmp_path / "memory"], tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert figures["memory_together/shipped-7b/resident"] == {"values": [54.5, 54.6], "unit": "GiB", "part": "memory"}
    assert figures["memory_thinker/shipped-7b/resident"]["values"] == [24.0, 24.0]
    assert figures["first_audio_p50/shipped-7b/one"]["values"] == [146.0, 146.0]
    assert "| 54.5 (54.5 to 54.6) |" in capsys.readouterr().out


def test_each_figure_is_of_one_part(tmp_path: Path) -> None:
    presets, many = tmp_path / "out" / "presets", tmp_path / "out" / "many"
    write(presets / "fast" / "listeners-64.1.json", answered(0, 0.146), answered(1, 0.146))
    write(many / "fast" / "listeners-96.1.json", answered(0, 0.2), answered(1, 0.2))
    SCRIPT["main"]([presets, many], tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    parts = {key: figure["part"] for key, figure in figures.items() if key.startswith("requests/")}
    assert parts == {"requests/fast/listeners-64": "presets", "requests/fast/listeners-96": "many"}
    write(many / "fast" / "listeners-64.1.json", answered(0, 0.2))
    with pytest.raises(typer.BadParameter, match=r"fast/listeners-64: presets and many have it"):
        SCRIPT["main"]([presets, many])


def test_folders_without_a_report_are_refused(tmp_path: Path) -> None:
    (tmp_path / "plain.json").write_text("{}")
    with pytest.raises(typer.BadParameter, match=r"^no report VARIANT/LOAD\.json in "):
        SCRIPT["main"]([tmp_path])
