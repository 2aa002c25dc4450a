# SPDX-License-Identifier: Apache-2.0
"""The micro benchmark's arithmetic and command: steps that count, ratios that mean something, failures that show."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

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
    return {"figures": [figure(micro, "thinker_step", by, 5, batch=1)], "facts": facts, "machine": {"gpu": None}}


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
    good = result(micro, "vllm", dtype="a")
    monkeypatch.setattr(
        command, "measure", lambda name, _plan, _logs: good if name == "thinker-vllm" else "exit code 1: why"
    )
    out = tmp_path / "micro.json"
    (tmp_path / "config.json").touch()
    options = ["--model", str(tmp_path), "--only", "thinker,thinker-vllm", "-o", str(out)]
    ran = CliRunner().invoke(command.app, options)
    assert ran.exit_code == 1
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["failures"] == {"thinker": "exit code 1: why"}
    assert [item["by"] for item in report["figures"]] == ["vllm"]
    assert (report["schema"], report["schema_version"]) == ("triton-omni-micro", 1)


@pytest.mark.parametrize(
    "options",
    [["--only", "vocoder"], ["--batch", "1,x"], ["--batch", "0"], ["--windows", "65"], ["--repeats", "0"], []],
)
def test_a_wrong_option_is_refused(micro, options, tmp_path):
    # The folder holds no checkpoint either, which is the last thing that is looked at.
    ran = CliRunner().invoke(micro("__main__").app, ["--model", str(tmp_path), *options])
    assert ran.exit_code == 2
    assert (options[0] if options else "--model") in ran.stderr


def test_the_table_puts_a_reference_beside_ours(micro):
    run = micro("report").Run(micro("plan").Plan("model"), ["micro"])
    run.results = {"thinker": result(micro, "triton-omni", dtype="a"), "thinker-vllm": result(micro, "vllm", dtype="a")}
    shown = micro("report").table(run.report())
    assert [list(column.cells) for column in shown.columns] == [
        ["thinker_step, ms"], ["batch 1"], ["5.00"], ["5.00"], ["vllm 5.00"], ["1.00"]
    ]  # fmt: skip
