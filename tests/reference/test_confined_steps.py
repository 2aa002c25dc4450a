# SPDX-License-Identifier: Apache-2.0
"""Decode steps that are recorded twice: which recording is replayed, and that both compute the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reference.teacher_forcing import (
    DEVICE,
    Trace,
    make_shallow_checkpoint,
    run_talker,
    run_thinker,
    talker,
    talker_prompts,
    thinker,
    thinker_prompts,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
on_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="steps are recorded on a GPU alone")

TOKENS = 24
BATCHES = (1, 3, 8)
"""Small ones: a library may choose its kernel for a larger product by the multiprocessors that it finds."""
LAYERS = 4
VOCABULARY = 250
PERCENT = 50
FUSED = SimpleNamespace(layers=True)


# --- which recording is replayed --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def partition() -> Any:
    from triton_omni.vllm_hooks.shared import partition

    return partition


@pytest.fixture
def streams(partition: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Streams that are current; a fake of a part's stream lies on top while it is."""
    current: list[Any] = ["usual"]

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(partition, "_on", on)
    monkeypatch.setattr(partition, "part_of", lambda device, percent: SimpleNamespace(stream=f"{percent} %"))
    return current


def make_runner(partition: Any, streams: list[Any], *, percent: int = PERCENT, fused: Any = FUSED) -> Any:
    """A runner whose base notes, in place of a graph, on which stream a step was recorded."""
    from triton_omni.vllm_hooks.shared.compat import CUDAGraphWrapper

    class Recorder:
        def __init__(self, vllm_config: Any, device: torch.device) -> None:
            self.vllm_config, self.device = vllm_config, device
            self.model = CUDAGraphWrapper.__new__(CUDAGraphWrapper)
            self.model.concrete_cudagraph_entries = {}

        def _capture_cudagraphs(self, batch_descriptors: Any, cudagraph_runtime_mode: Any, profiler: Any) -> None:
            del cudagraph_runtime_mode, profiler
            self.model.concrete_cudagraph_entries |= dict.fromkeys(batch_descriptors, streams[-1])

    class Runner(partition.PartitionMixin, Recorder):  # type: ignore[misc]
        _fused = fused

    return Runner(SimpleNamespace(additional_config={"partition_percent": percent}), torch.device("cuda", 0))


def record(runner: Any, mode: str = "FULL") -> tuple[Any, Any]:
    """Record a decode step and a step with prompts as vLLM does; return their descriptors."""
    from triton_omni.vllm_hooks.shared.compat import BatchDescriptor, CUDAGraphMode

    decode, mixed = BatchDescriptor(8, 8, uniform=True), BatchDescriptor(16)
    runner._capture_cudagraphs(
        batch_descriptors=[mixed, decode], cudagraph_runtime_mode=CUDAGraphMode[mode], profiler=nullcontext()
    )
    return decode, mixed


def test_confined_decode_steps_are_replayed_while_they_are_asked_for(partition: Any, streams: list[Any]) -> None:
    runner = make_runner(partition, streams)
    decode, mixed = record(runner)
    whole = {decode: "usual", mixed: "usual"}
    assert runner.model.concrete_cudagraph_entries == whole
    for confined, expected in [(True, whole | {decode: "50 %"}), (True, whole | {decode: "50 %"}), (False, whole)]:
        runner.confine(confined)
        assert runner.model.concrete_cudagraph_entries == expected
    assert streams == ["usual"]


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({"percent": 0}, "FULL"),
        ({"fused": None}, "FULL"),
        ({"fused": SimpleNamespace(layers=False)}, "FULL"),
        ({}, "PIECEWISE"),
    ],
    ids=["switched off", "not fused", "attention alone is fused", "not of whole steps"],
)
def test_other_steps_are_recorded_once(partition: Any, streams: list[Any], settings: dict[str, Any], mode: str) -> None:
    runner = make_runner(partition, streams, **settings)
    decode, mixed = record(runner, mode)
    runner.confine(True)
    assert runner.model.concrete_cudagraph_entries == {decode: "usual", mixed: "usual"}


def test_without_green_contexts_steps_are_recorded_once(
    partition: Any, streams: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "part_of", lambda device, percent: None)
    runner = make_runner(partition, streams)
    decode, mixed = record(runner)
    runner.confine(True)
    assert runner.model.concrete_cudagraph_entries == {decode: "usual", mixed: "usual"}


def test_a_recording_that_fails_leaves_vllm_its_own(partition: Any, streams: list[Any]) -> None:
    runner = make_runner(partition, streams)
    with pytest.raises(ZeroDivisionError), runner._apart():
        raise ZeroDivisionError
    decode, mixed = record(runner)
    assert runner.model.concrete_cudagraph_entries == {decode: "usual", mixed: "usual"}


@pytest.mark.parametrize(
    ("every", "percent", "count"), [(132, 50, 64), (132, 90, 112), (132, 1, 8), (108, 50, 48), (8, 50, 8)]
)
def test_a_part_has_whole_granules(partition: Any, every: int, percent: int, count: int) -> None:
    assert partition.processors_of(every, percent) == count


@pytest.mark.parametrize(
    "error", [RuntimeError("PyTorch was not built with Green Context support!"), AttributeError("no Stream")]
)
def test_torch_without_green_contexts_is_said_once(
    partition: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fail(**_sizes: int) -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr("torch.cuda.green_contexts.GreenContext", SimpleNamespace(create=fail))
    partition.part_of.cache_clear()
    assert [partition.part_of(torch.device("cuda", 0), PERCENT) for _ in range(2)] == [None, None]
    assert [record.getMessage() for record in caplog.records] == [f"decode steps are not confined: {error}"]
    partition.part_of.cache_clear()


def test_engines_without_such_steps_ignore_the_wish(tiny_checkpoint: Path) -> None:
    with thinker(tiny_checkpoint, dtype="float32", sequences=2) as engine:
        engine.confine(True)
        assert run_thinker(engine, thinker_prompts(2, VOCABULARY), 4).ids
    with talker(tiny_checkpoint, dtype="float32", sequences=2) as taped:
        taped.engine.confine(True)
        assert run_talker(taped, talker_prompts(tiny_checkpoint, 2, 4), 4).ids


# --- both recordings on a GPU -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shallow-7b")
    make_shallow_checkpoint(folder, "7b", LAYERS)
    return folder


@pytest.fixture
def under_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines take this process for one under MPS; the driver connects to the daemon earlier, if there is one."""
    if DEVICE.type == "cuda":
        torch.cuda.init()
        torch.zeros(1, device=DEVICE)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent")


def assert_equal(whole: Trace, confined: Trace) -> None:
    assert confined.ids == whole.ids
    for what in ("logits", "rows"):
        for key, expected in getattr(whole, what).items():
            assert torch.equal(getattr(confined, what)[key], expected), (what, key)


@on_gpu
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_both_recordings_of_a_thinker_give_the_same_bits(checkpoint: Path, under_mps: None, quantization: str) -> None:
    with thinker(checkpoint, dtype="bfloat16", sequences=max(BATCHES), quantization=quantization) as engine:
        assert engine._runner._confined, "no step was recorded again"
        for count in BATCHES:
            traces = []
            for confined in (False, True):
                engine.confine(confined)
                traces.append(run_thinker(engine, thinker_prompts(count, VOCABULARY), TOKENS))
            assert_equal(*traces)


@on_gpu
def test_both_recordings_of_a_talker_give_the_same_bits(checkpoint: Path, under_mps: None) -> None:
    with talker(checkpoint, dtype="bfloat16", sequences=max(BATCHES)) as taped:
        assert taped.engine._runner._confined, "no step was recorded again"
        for count in BATCHES:
            traces = []
            for confined in (False, True):
                taped.engine.confine(confined)
                traces.append(run_talker(taped, talker_prompts(checkpoint, count, TOKENS), TOKENS))
            assert_equal(*traces)


@on_gpu
def test_a_thinker_goes_from_one_recording_to_the_other_within_a_reply(checkpoint: Path, under_mps: None) -> None:
    with thinker(checkpoint, dtype="bfloat16", sequences=max(BATCHES)) as engine:
        prompts = thinker_prompts(max(BATCHES), VOCABULARY)
        whole = run_thinker(engine, prompts, TOKENS)
        step, taken = engine.step, iter(range(10_000))

        def alternating() -> Any:
            engine.confine(next(taken) % 3 == 0)
            return step()

        engine.step = alternating
        assert_equal(whole, run_thinker(engine, prompts, TOKENS))
