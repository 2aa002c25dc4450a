# SPDX-License-Identifier: Apache-2.0
"""The micro benchmark's arithmetic and command: steps that count, ratios that mean something, failures that show."""

from __future__ import annotations

import importlib
import io
import json
import pickle
import queue
from datetime import UTC, datetime, timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from unittest import mock

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from command_line import unframed

ROOT = Path(__file__).parents[2]


@pytest.fixture
def micro(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return lambda name: importlib.import_module(f"micro.{name}")


class ScriptedDecoder:
    """Gives the scripted numbers of tokens, step by step."""

    by = "triton-omni"

    def __init__(self, tokens):
        self.tokens = list(tokens)
        self.cleared = False

    def begin(self, batch, mode, tokens):
        pass

    def step(self):
        return self.tokens.pop(0)

    def clear(self):
        self.cleared = True


def times(micro, decoder, **plan):
    plan = micro("plan").Plan("model", batches=(4,), steps=3, warm_up=2, **plan)
    return micro("decoding").step_times(decoder, plan, 4, micro("decoding").GREEDY)


def test_only_steps_of_the_whole_batch_after_warm_up_are_timed(micro):
    decoder = ScriptedDecoder([0, 1, 0, 3, 4, 4, 4, 4, 0, 4, 4])
    assert len(times(micro, decoder)) == 3
    assert decoder.tokens == []
    assert decoder.cleared


def test_a_sequence_that_ends_early_stops_the_measurement(micro):
    decoder = ScriptedDecoder([4, 4, 4, 4, 3])
    with pytest.raises(micro("decoding").StepError, match="3 tokens of 4"):
        times(micro, decoder)
    assert decoder.cleared


def test_a_summary_has_the_percentiles_of_its_times(micro):
    found = micro("figures").milliseconds("x", "us", [0.001 * value for value in range(1, 12)])
    assert (found["count"], found["min"], found["max"]) == (11, 1.0, 11.0)
    assert found["p50"] == pytest.approx(6.0)
    assert found["p90"] == pytest.approx(10.0)


@pytest.mark.parametrize(("count", "p90"), [(9, None), (10, 2.0)])
def test_fewer_than_ten_times_have_no_p90(micro, count, p90):
    found = micro("figures").milliseconds("x", "us", [0.002] * count)
    assert (found["p50"], found["p90"]) == (2.0, p90)


def figure(micro, name, by, milliseconds, **parameters):
    return micro("figures").milliseconds(name, by, [milliseconds / 1e3], parameters)


def test_steps_are_read_as_ours_over_the_reference_and_replies_the_other_way_round(micro):
    found = micro("figures").ratios([
        figure(micro, "thinker_step", "triton-omni", 6, batch=1),
        figure(micro, "thinker_step", "vllm", 5, batch=1),
        figure(micro, "thinker_step", "vllm", 50, batch=8),
        figure(micro, "token2wav_offline", "triton-omni", 2, audio_s=10.0),
        figure(micro, "token2wav_offline", "hf", 30, audio_s=10.0),
    ])  # fmt: skip
    assert [(item["name"], item["ratio"]) for item in found] == [
        ("thinker_step", pytest.approx(1.2)),
        ("token2wav_offline", pytest.approx(15)),
    ]


def result(micro, by, **facts):
    return micro("report").Result(
        {"gpu": None}, facts, [figure(micro, "thinker_step", by, 5, batch=1)], [2.0, 3.0, 4.0]
    )


def test_engines_that_differ_get_no_ratio(micro):
    run = micro("report").Run(micro("plan").Plan("model"), ["micro"])
    run.results = {"thinker": result(micro, "triton-omni", dtype="a"), "thinker-vllm": result(micro, "vllm", dtype="a")}
    assert [item["ratio"] for item in run.report()["ratios"]] == [1.0]
    run.results["thinker-vllm"] = result(micro, "vllm", dtype="b")
    report = run.report()
    assert report["ratios"] == []
    assert report["not_comparable"] == {"thinker": ["dtype"]}


def test_a_plan_survives_its_way_to_the_child(micro):
    plan = micro("plan").Plan("model", batches=(1, 2), offline_seconds=(0.5,), enforce_eager=True)
    assert micro("plan").Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_failed_measurement_is_reported_and_the_others_are_kept(micro, monkeypatch, tmp_path):
    command = micro("__main__")

    def measure(name, _plan, _logs, tell):
        tell({"machine": {"gpu": None}, "took_s": 2.0})
        if name == "thinker":
            return "exit code 1: why"
        tell({"ready": {"dtype": "a"}, "took_s": 3.0})
        tell({"figure": figure(micro, "thinker_step", "vllm", 5, batch=1), "took_s": 4.0})
        return None

    monkeypatch.setattr(command, "measure", measure)
    out = tmp_path / "micro.json"
    (tmp_path / "config.json").touch()
    options = ["--model", str(tmp_path), "-o", str(out), "--only"]
    ran = CliRunner().invoke(command.app, [*options, "thinker,thinker-vllm"])
    assert ran.exit_code == 1
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["failures"] == {"thinker": "exit code 1: why"}
    assert [item["by"] for item in report["figures"]] == ["vllm"]
    assert report["seconds"] == {"thinker": {"start": 2}, "thinker-vllm": {"start": 2, "engine": 3, "figures": 4}}
    assert report["unfinished"] == []
    assert "thinker_step (vllm) batch 1: p50 5.00 ms, p90 -, n 1" in ran.stdout
    assert (report["schema"], report["schema_version"]) == ("triton-omni-micro", 2)
    nothing = CliRunner().invoke(command.app, [*options, "thinker"])
    assert (nothing.exit_code, nothing.stdout) == (1, "")
    assert "thinker failed: exit code 1: why" in nothing.stderr


def test_what_was_measured_is_written_before_the_run_is_cut_short(micro, monkeypatch, tmp_path):
    command, out, plan = micro("__main__"), tmp_path / "micro.json", micro("plan").Plan("model")

    def measure(_name, _plan, _logs, tell):
        tell({"machine": {"gpu": None}, "took_s": 2.0})
        tell({"ready": {}, "took_s": 3.0})
        tell({"figure": figure(micro, "thinker_step", "vllm", 5, batch=1), "took_s": 4.0})
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        command.run_all(["thinker", "talker"], plan, micro("report").Run(plan, []), out)
    report = json.loads(out.read_text(encoding="utf-8"))
    assert [item["name"] for item in report["figures"]] == ["thinker_step"]
    assert report["unfinished"] == ["thinker", "talker"]
    assert [path.name for path in tmp_path.iterdir()] == ["micro.json"]


def run_child(micro, monkeypatch, tmp_path, code):
    """`measure` of a child that runs this code instead, with the descriptor's number as `out`."""
    command, told = micro("__main__"), []
    package = tmp_path / "micro"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "child.py").write_text(f"import os, sys\nout = os.fdopen(int(sys.argv[3]), 'w')\n{code}\n")
    monkeypatch.setattr(command, "SCRIPTS", tmp_path)
    return command.measure("thinker", micro("plan").Plan("model"), tmp_path, told.append), told


def test_a_childs_lines_are_passed_on_and_its_last_words_are_the_reason_of_a_failure(micro, monkeypatch, tmp_path):
    code = "print('{\"ready\": {}}', file=out, flush=True)\nsys.exit('out of memory')"
    reason, (line,) = run_child(micro, monkeypatch, tmp_path, code)
    assert reason == "exit code 1: out of memory"
    assert line.keys() == {"ready", "took_s"}
    assert line["took_s"] > 0


def test_a_child_that_ends_well_has_no_reason(micro, monkeypatch, tmp_path):
    assert run_child(micro, monkeypatch, tmp_path, "pass") == (None, [])


@pytest.mark.parametrize(
    "tensor", [torch.ones(2, 3), torch.empty(0, 4, dtype=torch.bfloat16), torch.arange(3, dtype=torch.int32)]
)
def test_a_tensor_passes_between_the_stages_without_triton(micro, tensor):
    from triton_omni.stub.tensors import read_tensor, write_tensor

    sent = write_tensor(micro("pipeline").PLAIN_UTILS, "ROWS", tensor)
    found = read_tensor(micro("pipeline").PlainTensor("ROWS", pickle.loads(ForkingPickler.dumps(sent.value))))
    assert found.shape == tensor.shape
    assert torch.equal(found.to(tensor.dtype), tensor)


def test_a_stage_of_the_pipeline_hands_an_error_on(micro, monkeypatch):
    from triton_omni.stub import launch

    adapter, inbox, send_queue = mock.Mock(), queue.SimpleQueue(), queue.SimpleQueue()
    monkeypatch.setenv(launch.CHECKPOINT_VARIABLE, "")
    monkeypatch.setattr(launch, "start_talker", lambda *_: adapter)
    monkeypatch.setattr(launch, "end_process", lambda close: close())
    for given in ({"error": "no such voice"}, None):
        inbox.put(given)
    micro("pipeline").serve("model", queue.SimpleQueue(), "talker", inbox, send_queue)
    assert send_queue.get_nowait() == {"error": "no such voice"}
    adapter.execute.assert_not_called()


def test_the_pipeline_is_measured_on_request_alone(micro):
    assert "pipeline" not in micro("__main__").chosen(None)
    assert micro("__main__").chosen("pipeline") == ["pipeline"]


@pytest.mark.parametrize(("seconds_a_figure", "count"), [(0.0, 3), (60.0, 7)])
def test_slow_replies_are_repeated_less_often_but_three_times(micro, seconds_a_figure, count):
    plan = micro("plan").Plan("model", repeats=7, warm_up=10, seconds_a_figure=seconds_a_figure)
    calls = iter(range(100))
    times = micro("plan").repeated(plan, lambda: float(next(calls)))
    assert times == [float(number) for number in range(2, 2 + count)]


@pytest.mark.parametrize(
    "options",
    [["--only", "vocoder"], ["--batch", "1,x"], ["--batch", "0"], ["--windows", "65"], ["--repeats", "0"], []],
)
def test_a_wrong_option_is_refused(micro, options, tmp_path):
    # The folder holds no checkpoint either, which is the last thing that is looked at.
    ran = CliRunner().invoke(micro("__main__").app, ["--model", str(tmp_path), *options])
    assert ran.exit_code == 2
    assert (options[0] if options else "--model") in ran.stderr


def test_a_report_that_could_not_be_written_is_refused_before_anything_is_measured(micro, monkeypatch, tmp_path):
    command = micro("__main__")
    monkeypatch.setattr(command, "measure", mock.Mock(side_effect=AssertionError))
    ran = CliRunner().invoke(command.app, ["-o", str(tmp_path / "nowhere" / "a.json")])
    assert (ran.exit_code, unframed("nowhere/a.json: its folder does not exist") in unframed(ran.stderr)) == (2, True)


def test_the_help_names_every_measurement_on_a_narrow_terminal(micro):
    shown = CliRunner().invoke(micro("__main__").app, ["--help"], env={"COLUMNS": "80"}).stdout.split()
    assert set(micro("child").MEASUREMENTS) <= {word.rstrip(",.") for word in shown}


def test_the_date_of_a_report_is_when_its_run_began(micro, monkeypatch):
    run = micro("report").Run(micro("plan").Plan("model"), ["micro"])
    monkeypatch.setattr(micro("report"), "datetime", mock.Mock(side_effect=AssertionError))
    begun = datetime.fromisoformat(run.report()["environment"]["date"])
    assert begun.utcoffset() == timedelta(0)
    assert timedelta(0) <= datetime.now(UTC) - begun < timedelta(minutes=5)


def test_names_of_figures_are_whole_on_a_narrow_terminal(micro):
    names = ["token2wav_window_dit", "token2wav_window_vocoder", "token2wav_throughput", "token2wav_window_profiled"]
    figures = [figure(micro, name, "triton-omni", 1234, batch=32, solver="rk4") for name in names]
    figures += [figure(micro, "thinker_step", by, 5, mode="sampled, with a penalty") for by in ("triton-omni", "vllm")]
    run = micro("report").Run(micro("plan").Plan("model"), ["micro"])
    run.results = {"all": micro("report").Result({}, {}, figures, [1.0])}
    out = io.StringIO()
    Console(file=out, width=80).print(micro("report").table(run.report()))
    shown = out.getvalue()
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert {*names, "thinker_step", "ratio", "1.00"} <= {word.rstrip(",") for word in shown.split()}


def test_the_table_puts_a_reference_beside_ours(micro):
    run = micro("report").Run(micro("plan").Plan("model"), ["micro"])
    run.results = {"thinker": result(micro, "triton-omni", dtype="a"), "thinker-vllm": result(micro, "vllm", dtype="a")}
    shown = micro("report").table(run.report())
    assert [list(column.cells) for column in shown.columns] == [
        ["thinker_step, ms"], ["batch 1"], ["5.00"], ["-"], ["vllm 5.00"], ["1.00"]
    ]  # fmt: skip
