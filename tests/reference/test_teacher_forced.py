# SPDX-License-Identifier: Apache-2.0
"""Fast decode steps against plain ones at every position, along the plain path's own tokens.

Layers have the published sizes of 3B and 7B; only their number is cut. Fused and recorded steps in bfloat16 must be as
near to vLLM's steps in float32 as vLLM's own steps in bfloat16 are. FP8 steps may be a stated multiple further.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reference.dequantised import write_dequantised
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
from triton_omni.checkpoint.facts import FourBit, FourBitMethod
from triton_omni.checkpoint.synthetic_config import FOUR_BIT_METHODS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
on_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="recorded and fused decode steps need a GPU")

TOKENS = 48
BATCHES = (1, 8, 32)
LAYERS = 4
AS_NEAR = Error(typical=1.25, worst=1.5)
"""Largest error of fast steps against float32, as a multiple of that of plain steps in bfloat16."""
FP8 = Error(typical=12.0, worst=12.0)
"""Largest error of FP8 steps, as a multiple of that of plain steps in bfloat16. FP8 has 4 bits of mantissa and bfloat16
8, so each rounding is 16 times as large. The products alone are in FP8: an H100 measured 10 to 11.
"""
WEIGHTS_ALONE = Error(typical=1.0, worst=1.25)
"""Largest error of fused FP8 steps, as a multiple of that of vLLM's. vLLM's steps round a product's rows
as coarsely as its weights, fused ones the weights alone. Two equal errors add up by their squares, so one of them is
0.7 of the sum. The keys and values of prompts are vLLM's in both.
"""
CHANGED = 0.06
"""Relative error by which a changed network is noticed: three times that of plain steps in bfloat16."""
VOCABULARY = 250
"""Ids that every checkpoint has as ordinary tokens."""


@pytest.fixture(scope="module", params=["3b", "7b"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(f"shallow-{request.param}")
    make_shallow_checkpoint(folder, request.param, LAYERS)
    return folder


def thinker_traces(
    checkpoint: Path, teachers: dict[int, Trace] | None = None, *, dtype: str = "bfloat16", **engine: object
) -> dict[int, Trace]:
    with thinker(checkpoint, dtype=dtype, sequences=max(BATCHES), **engine) as made:  # type: ignore[arg-type]
        return {
            count: run_thinker(made, thinker_prompts(count, VOCABULARY), TOKENS, teachers and teachers[count])
            for count in BATCHES
        }


def talker_traces(
    checkpoint: Path, teachers: dict[int, Trace] | None = None, *, dtype: str = "bfloat16", **engine: object
) -> dict[int, Trace]:
    with talker(checkpoint, dtype=dtype, sequences=max(BATCHES), **engine) as made:
        return {
            count: run_talker(made, talker_prompts(checkpoint, count, TOKENS), TOKENS, teachers and teachers[count])
            for count in BATCHES
        }


PLAIN: dict[str, Any] = {"fused_decode": False, "enforce_eager": True, "async_scheduling": False}
"""vLLM's own steps, launched one kernel at a time."""


def errors(exact: dict[int, Trace], other: dict[int, Trace]) -> dict[str, Error]:
    """Relative errors against the exact steps, by batch and tensor."""
    found = {}
    for count, expected in exact.items():
        assert other[count].ids == expected.ids, "the forced ids were not drawn"
        for what in ("logits", "rows"):
            if theirs := getattr(expected, what):
                found[f"batch {count}, {what}"] = relative_error(theirs, getattr(other[count], what))
    return found


def assert_bounded(name: str, found: dict[str, Error], bounds: dict[str, Error]) -> None:
    """Every error is within its bound; all are printed first, so that a failure shows the whole table."""
    for what, error in found.items():
        print(
            f"{name}, {what}: typical {error.typical:.4f} of at most {bounds[what].typical:.4f}, "
            f"worst {error.worst:.4f} of at most {bounds[what].worst:.4f}"
        )
    assert [
        what
        for what, error in found.items()
        if error.typical > bounds[what].typical or error.worst > bounds[what].worst
    ] == []


def as_near(plain: dict[str, Error], most: Error = AS_NEAR) -> dict[str, Error]:
    return {what: Error(most.typical * error.typical, most.worst * error.worst) for what, error in plain.items()}


@on_gpu
@pytest.mark.parametrize("traces", [thinker_traces, talker_traces], ids=["thinker", "talker"])
def test_steps_along_the_plain_path(checkpoint: Path, traces: Any) -> None:
    plain = traces(checkpoint, **PLAIN)
    exact = traces(checkpoint, plain, dtype="float32", **PLAIN)
    bounds = as_near(errors(exact, plain))
    recorded = errors(exact, traces(checkpoint, plain, fused_decode=False))
    fused = errors(exact, traces(checkpoint, plain, fused_decode=True))
    assert_bounded("recorded", recorded, bounds)
    assert_bounded("fused", fused, bounds)


@on_gpu
def test_thinker_steps_in_fp8(checkpoint: Path) -> None:
    plain = thinker_traces(checkpoint, **PLAIN)
    exact = thinker_traces(checkpoint, plain, dtype="float32", **PLAIN)
    recorded = errors(exact, thinker_traces(checkpoint, plain, fused_decode=False, quantization="fp8"))
    fused = errors(exact, thinker_traces(checkpoint, plain, fused_decode=True, quantization="fp8"))
    assert_bounded("FP8 recorded", recorded, as_near(errors(exact, plain), FP8))
    assert_bounded("FP8 fused", fused, as_near(recorded, WEIGHTS_ALONE))


@on_gpu
@pytest.mark.parametrize("method", FOUR_BIT_METHODS)
def test_thinker_steps_in_four_bits(method: FourBitMethod, tmp_path: Path) -> None:
    """Marlin's products of 4-bit weights round no more than plain ones of the same weights in bfloat16."""
    packed, dense = tmp_path / "packed", tmp_path / "dense"
    dense.mkdir()
    make_shallow_checkpoint(packed, "7b", LAYERS, FourBit(method, 128))
    write_dequantised(packed, dense)
    plain = thinker_traces(dense, **PLAIN)
    exact = thinker_traces(dense, plain, dtype="float32", **PLAIN)
    bounds = as_near(errors(exact, plain))
    recorded = errors(exact, thinker_traces(packed, plain, fused_decode=False))
    fused = errors(exact, thinker_traces(packed, plain, fused_decode=True))
    assert_bounded(f"{method} recorded", recorded, bounds)
    assert_bounded(f"{method} fused", fused, bounds)


def test_a_larger_error_than_that_of_plain_steps_is_noticed() -> None:
    bounds = as_near({"logits": Error(0.02, 0.04)})
    assert_bounded("equal", {"logits": Error(0.025, 0.06)}, bounds)
    for worse in (Error(0.026, 0.04), Error(0.02, 0.061), Error(float("inf"), float("inf"))):
        with pytest.raises(AssertionError):
            assert_bounded("worse", {"logits": worse}, bounds)


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
    assert relative_error(plain.rows, changed.rows).typical > CHANGED
    assert relative_error(plain.logits, changed.logits).typical > CHANGED


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
    assert relative_error(plain.logits, changed.logits).typical > CHANGED
