# SPDX-License-Identifier: Apache-2.0
"""Fast decode steps against plain ones at every position, along the plain path's own tokens.

Layers have the published sizes of 3B and 7B; only their number is cut. Steps by fused kernels, recorded steps and
products in FP8 are compared with vLLM's own steps, launched one kernel at a time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from reference.teacher_forcing import (
    DEVICE,
    Error,
    Trace,
    make_shallow_checkpoint,
    relative_error,
    run_talker,
    run_thinker,
    talker,
    talker_prompts,
    thinker,
    thinker_prompts,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
on_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="recorded and fused decode steps need a GPU")

TOKENS = 48
BATCHES = (1, 8, 32)
LAYERS = 4
HALF_PRECISION = Error(typical=0.02, worst=0.06)
"""Bounds of the relative error of a position's row or logits: sums of bfloat16 products in another order."""
FP8 = Error(typical=0.15, worst=0.5)
"""The same of products in 8 bits against bfloat16, with random weights."""
VOCABULARY = 250
"""Ids that every checkpoint has as ordinary tokens."""


@pytest.fixture(scope="module", params=["3b", "7b"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(f"shallow-{request.param}")
    make_shallow_checkpoint(folder, request.param, LAYERS)
    return folder


def thinker_traces(checkpoint: Path, teachers: dict[int, Trace] | None = None, **engine: object) -> dict[int, Trace]:
    with thinker(checkpoint, dtype="bfloat16", sequences=max(BATCHES), **engine) as made:  # type: ignore[arg-type]
        return {
            count: run_thinker(made, thinker_prompts(count, VOCABULARY), TOKENS, teachers and teachers[count])
            for count in BATCHES
        }


def talker_traces(checkpoint: Path, teachers: dict[int, Trace] | None = None, **engine: object) -> dict[int, Trace]:
    with talker(checkpoint, dtype="bfloat16", sequences=max(BATCHES), **engine) as made:
        return {
            count: run_talker(made, talker_prompts(checkpoint, count, TOKENS), TOKENS, teachers and teachers[count])
            for count in BATCHES
        }


def check(name: str, plain: dict[int, Trace], other: dict[int, Trace], bound: Error) -> None:
    for count, expected in plain.items():
        found = other[count]
        assert found.ids == expected.ids, f"{name}: the forced ids were not drawn"
        for what, ours, theirs in (("logits", found.logits, expected.logits), ("rows", found.rows, expected.rows)):
            if theirs:
                error = relative_error(theirs, ours)
                print(f"{name}, batch {count}, {what}: typical {error.typical:.4f}, worst {error.worst:.4f}")
                assert error.typical < bound.typical, (name, count, what)
                assert error.worst < bound.worst, (name, count, what)


@on_gpu
def test_thinker_steps_along_the_plain_path(checkpoint: Path) -> None:
    plain = thinker_traces(checkpoint, fused_decode=False, enforce_eager=True, async_scheduling=False)
    check("recorded", plain, thinker_traces(checkpoint, plain, fused_decode=False), HALF_PRECISION)
    check("fused", plain, thinker_traces(checkpoint, plain, fused_decode=True), HALF_PRECISION)


@on_gpu
def test_thinker_steps_in_fp8(checkpoint: Path) -> None:
    plain = thinker_traces(checkpoint, fused_decode=False, enforce_eager=True, async_scheduling=False)
    recorded = thinker_traces(checkpoint, plain, fused_decode=False, quantization="fp8")
    check("FP8 against bfloat16", plain, recorded, FP8)
    fused = thinker_traces(checkpoint, plain, fused_decode=True, quantization="fp8")
    check("FP8 fused against FP8 recorded", recorded, fused, HALF_PRECISION)


@on_gpu
def test_talker_steps_along_the_plain_path(checkpoint: Path) -> None:
    plain = talker_traces(checkpoint, fused_decode=False, enforce_eager=True, async_scheduling=False)
    check("recorded", plain, talker_traces(checkpoint, plain, fused_decode=False), HALF_PRECISION)
    check("fused", plain, talker_traces(checkpoint, plain, fused_decode=True), HALF_PRECISION)


def test_a_changed_thinker_is_noticed(tiny_checkpoint: Path) -> None:
    """The comparison finds nothing without a change, and more than the bound with one norm of a layer scaled."""
    prompts = thinker_prompts(3, VOCABULARY)
    with thinker(tiny_checkpoint, dtype="float32", sequences=4) as engine:
        plain = run_thinker(engine, prompts, 8)
        same = run_thinker(engine, prompts, 8, plain)
        assert same.ids == plain.ids
        assert relative_error(plain.logits, same.logits).worst < 1e-5
        assert relative_error(plain.rows, same.rows).worst < 1e-5
        layer = engine._model.language_model.model.layers[0]
        layer.post_attention_layernorm.weight.data.mul_(1.5)
        changed = run_thinker(engine, prompts, 8, plain)
    assert changed.ids == plain.ids
    assert relative_error(plain.rows, changed.rows).typical > HALF_PRECISION.worst
    assert relative_error(plain.logits, changed.logits).typical > HALF_PRECISION.worst


def test_a_changed_talker_is_noticed(tiny_checkpoint: Path) -> None:
    prompts = talker_prompts(tiny_checkpoint, 3, 8)
    with talker(tiny_checkpoint, dtype="float32", sequences=4) as engine:
        plain = run_talker(engine, prompts, 8)
        same = run_talker(engine, prompts, 8, plain)
        assert same.ids == plain.ids
        assert relative_error(plain.logits, same.logits).worst < 1e-5
        layer = engine.engine._runner.get_model().model.layers[0]
        layer.post_attention_layernorm.weight.data.mul_(1.5)
        changed = run_talker(engine, prompts, 8, plain)
    assert changed.ids == plain.ids
    assert relative_error(plain.logits, changed.logits).typical > HALF_PRECISION.worst
