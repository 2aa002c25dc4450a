# SPDX-License-Identifier: Apache-2.0
"""Every measurement of the micro benchmark runs on the tiny checkpoint; plain vLLM is set up as our engines are."""

from __future__ import annotations

import dataclasses
import importlib
import multiprocessing
from pathlib import Path

import pytest
import torch

from triton_omni.core.settings import Preset, Token2WavSettings

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def micro(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return lambda name: importlib.import_module(f"micro.{name}")


@pytest.fixture
def plan(micro, tiny_checkpoint):
    sizes = {"batches": (1, 3), "window_batches": (1, 2), "offline_seconds": (0.5,), "prompt_tokens": 8}
    return micro("plan").Plan(str(tiny_checkpoint), steps=4, repeats=2, warm_up=3, **sizes)


@pytest.fixture
def coarse(micro, monkeypatch):
    """Windows are solved in fewer steps, whose time is not asked for here."""
    presets = {"reference": Preset(num_steps=3), "fast": Preset(num_steps=2)}
    monkeypatch.setattr(micro("speech"), "PRESETS", presets)


@pytest.fixture
def forked(micro, monkeypatch):
    """The pipeline's processes come from one that has imported vLLM for all, and are else as those that are spawned."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"triton_omni.vllm_hooks.{name}_engine" for name in ("thinker", "talker")])
    monkeypatch.setattr(micro("pipeline").multiprocessing, "get_context", lambda _: context)


@pytest.mark.parametrize("stage", ["thinker", "talker"])
def test_our_steps_and_plain_vllms_are_comparable(micro, plan, stage):
    measurements = micro("child").MEASUREMENTS
    run = micro("report").Run(plan, ["micro"])
    for name in (stage, f"{stage}-vllm"):
        for item in measurements[name](plan):
            run.take(name, (item if "ready" in item else {"figure": item}) | {"took_s": 1.0})
    assert run.differences() == {}
    report = run.report()
    modes = len(getattr(micro("child"), f"{stage.upper()}_MODES"))
    assert len(report["figures"]) == 2 * len(report["ratios"]) == 2 * 2 * modes
    assert all(figure["count"] == 4 and figure["min"] > 0 for figure in report["figures"])


def test_first_tokens_behind_media_are_compared_with_plain_vllms(micro, plan):
    measurements, plan = micro("child").MEASUREMENTS, dataclasses.replace(plan, media_seconds=1.0)
    run = micro("report").Run(plan, ["micro"])
    for name in ("media", "media-vllm"):
        for item in measurements[name](plan):
            run.take(name, (item if "ready" in item else {"figure": item}) | {"took_s": 1.0})
    assert run.differences() == {}
    found = {ratio["parameters"]["prompt"]: ratio["ratio"] for ratio in run.report()["ratios"]}
    assert list(found) == ["text", "image 1024 x 768", "1 s of sound", "1 s of video 640 x 364"]
    assert all(ratio > 0 for ratio in found.values())


def test_draws_and_noise_with_seeds_are_compared_with_those_without(micro, plan):
    run = micro("report").Run(plan, ["micro"])
    for item in micro("child").seeds(plan):
        run.take("seeds", (item if "ready" in item else {"figure": item}) | {"took_s": 1.0})
    found = {(ratio["name"], ratio["parameters"]["batch"]) for ratio in run.report()["ratios"]}
    assert found == {(name, batch) for name in ("draw", "noise") for batch in plan.batches}


@pytest.mark.usefixtures("coarse")
def test_windows_are_timed_in_halves_and_whole(micro, plan):
    ready, *figures = micro("child").token2wav_windows(plan)
    assert "ready" in ready
    found = {(item["name"], item["parameters"].get("preset"), item["parameters"]["batch"]) for item in figures}
    assert ("token2wav_window_dit", "reference", 2) in found
    assert ("token2wav_window_vocoder", None, 2) in found
    assert {("token2wav_throughput", preset, 2) for preset in Token2WavSettings().presets} <= found
    rates = [item["parameters"] for item in figures if item["name"] == "token2wav_throughput"]
    assert {one["windows"] for one in rates if one["batch"] == 2} == {"small", "regular"}
    evaluations = {item["parameters"]["preset"]: item["parameters"].get("evaluations") for item in figures[4:]}
    assert evaluations == {"reference": 8, "fast": 4}
    assert all(item["count"] == 2 and item["min"] > 0 for item in figures)


@pytest.mark.usefixtures("coarse")
def test_the_time_of_a_window_is_told_by_kernel(micro, plan):
    ready, *figures = micro("child").token2wav_kernels(plan)
    assert "ready" in ready
    for batch in plan.window_batches:
        whole, *by_kernel = [figure for figure in figures if figure["parameters"]["batch"] == batch]
        assert (whole["name"], whole["count"]) == ("token2wav_window_profiled", 2)
        found = {figure["parameters"]["kernel"]: figure["p50"] for figure in by_kernel}
        assert len(found) == micro("kernels").SHOWN + 1
        assert list(found)[-1] == "all others"
        # A GPU may start a kernel before the one ahead of it ends, so their sum can exceed the window.
        assert all(0 < milliseconds < whole["max"] for milliseconds in found.values())


def test_streams_are_nearly_the_whole_reply_and_less_context_costs_more(micro, plan, monkeypatch):
    for name, value in {"CODES": 120, "REPLIES": 2}.items():
        monkeypatch.setattr(micro("quality"), name, value)
    ready, *figures = micro("child").token2wav_quality(plan)
    assert "ready" in ready
    decibel = {tuple(figure["parameters"].values()): figure["min"] for figure in figures}
    assert 35 < decibel["low_latency", "offline"] < decibel["balanced", "offline"] < 100
    assert len(figures) == len(Token2WavSettings().plans) + torch.cuda.is_available()
    assert all(figure["unit"] == "dB" and figure["min"] > 35 for figure in figures)


def test_whole_replies_are_compared_with_hf(micro, plan):
    child = micro("child")
    items = [*child.token2wav_offline(plan), *child.token2wav_offline_hf(plan)]
    figures = [item for item in items if "ready" not in item]
    (ratio,) = micro("figures").ratios(figures)
    assert ratio["parameters"] == {"audio_s": 0.5}
    assert ratio["ratio"] > 0


@pytest.mark.usefixtures("forked")
def test_the_stages_without_triton_give_replies_of_the_plans_lengths(micro, plan):
    lengths = {"prompt_tokens": 40, "reply_tokens": 20, "codes": 60}
    ready, *figures = micro("pipeline").pipeline(dataclasses.replace(plan, **lengths), torch.device("cpu"))
    assert "ready" in ready
    assert [(item["name"], item["parameters"]) for item in figures] == [
        ("pipeline_first_text", lengths),
        ("pipeline_first_audio", lengths),
        ("pipeline_reply", lengths),
    ]
    text, audio, whole = (item["p50"] for item in figures)
    assert 0 < text < whole
    assert 0 < audio < whole


@pytest.mark.usefixtures("forked")
def test_a_pipeline_whose_stage_does_not_start_says_so_and_leaves_no_process(micro):
    with pytest.raises(micro("pipeline").PipelineError, match="did not start"):
        micro("pipeline").Pipeline("/nowhere")
    assert multiprocessing.active_children() == []


def test_a_window_of_another_size_is_not_timed(micro, plan, tiny_checkpoint):
    speech = micro("speech")
    engine = speech.Token2WavEngine(tiny_checkpoint, speech.window_settings(plan), micro("plan").device())
    with speech.WindowStreams(engine, plan, 2, "fast") as streams, pytest.raises(speech.WrongWorkError):
        streams.step()
    assert engine.stats().running == 0


def test_windows_of_a_preset_are_solved_as_shipped(micro):
    flows = {name: micro("speech").flow(name) for name in Token2WavSettings().presets}
    assert {name: (each["solver"], each["evaluations"]) for name, each in flows.items()} == {
        "reference": ("rk4", 36),
        "fast": ("rk4", 12),
    }
