# SPDX-License-Identifier: Apache-2.0
"""Bfloat16, the precision of thinker and talker on a GPU, against HF in float32: hidden rows and logits.

Tokens may differ where two are nearly equal. So the engines are made to draw HF's tokens, and every position of prompt
and reply is compared. The engines run on a GPU, with CUDA graphs, where there is one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from reference.hf import HfReference
from reference.talker.rig import DEVICE, HfTalker
from reference.teacher_forcing import (
    BFLOAT16,
    Error,
    SpokenPrompt,
    Trace,
    relative_error,
    run_talker,
    run_thinker,
    talker,
    thinker,
)
from triton_omni.checkpoint.config import load_config
from triton_omni.checkpoint.speakers import load_speakers
from triton_omni.session.engine import Sampling

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

# 4 bits of mantissa round by up to 6 %, 2.6 % on average, inputs and weights both, in the four
# products of each of the tiny checkpoint's two layers: 2.6 % x sqrt(2 x 8) = 10 %, which is what an H200 gave. Fused
# decode steps round the weights alone: 7 %.
BOUNDS = {"none": BFLOAT16, "fp8": Error(typical=0.15, worst=0.5)}
TOKENS = 24


@pytest.mark.parametrize("text", ["hello", "Tell me about the sea. " * 8])
@pytest.mark.parametrize(
    "quantization",
    ["none", pytest.param("fp8", marks=pytest.mark.skipif(DEVICE.type == "cpu", reason="fp8 needs a GPU"))],
)
def test_thinker_rows_in_bfloat16(tiny_checkpoint: Path, hf: HfReference, text: str, quantization: str) -> None:
    chat = hf.render([{"role": "user", "content": [{"type": "text", "text": text}]}])
    ids = tuple(hf.processor.tokenizer(chat)["input_ids"])
    expected = hf.thinker(hf.ask(text), Sampling(temperature=0, max_tokens=TOKENS, min_tokens=TOKENS))
    with thinker(tiny_checkpoint, dtype="bfloat16", sequences=4, quantization=quantization) as engine:
        parts = engine._model.named_parameters()
        quantised = {name.split(".")[0] for name, part in parts if part.dtype == torch.float8_e4m3fn}
        assert quantised == ({"language_model"} if quantization == "fp8" else set())
        ours = run_thinker(engine, {"a": ids}, TOKENS, Trace({"a": list(expected.token_ids)}))
    assert ours.ids["a"] == list(expected.token_ids)
    rows = torch.cat([ours.prompt_rows["a"], ours.rows["a"]])
    assert len(rows) == len(ids) + TOKENS - 1
    assert_near(expected.rows, rows, BOUNDS[quantization])


def test_talker_logits_in_bfloat16(tiny_checkpoint: Path, hf: HfReference) -> None:
    reference: Any = HfTalker(hf.model)
    voice = load_speakers(tiny_checkpoint, load_config(tiny_checkpoint)).default.text_bos_id
    case = reference.case(3, 33, 9, voice, image=True)
    codes, logits = reference.logits(case, TOKENS)
    with talker(tiny_checkpoint, dtype="bfloat16", sequences=4) as taped:
        ours = run_talker(taped, {"a": SpokenPrompt(case.prompt, case.rows)}, TOKENS, Trace({"a": codes}))
    assert ours.ids["a"] == codes
    # The step has ruled out what may not be drawn.
    drawn = ours.logits["a"].isfinite()
    assert drawn.float().mean() > 0.9
    assert_near(logits.where(drawn, 0), ours.logits["a"].where(drawn, 0), BOUNDS["none"])


def assert_near(expected: torch.Tensor, ours: torch.Tensor, bounds: Error) -> None:
    """Every position is within the bounds, and rounding shows: the precision is the one asked for."""
    error = relative_error({"a": expected}, {"a": ours})
    assert 1e-4 < error.typical < bounds.typical
    assert error.worst < bounds.worst
