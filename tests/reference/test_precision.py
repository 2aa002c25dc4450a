# SPDX-License-Identifier: Apache-2.0
"""Bfloat16, the precision of thinker and talker on a GPU, against HF in float32: hidden rows and logits.

Tokens may differ where two are nearly equal, so what is compared is computed from the prompt alone. The engines run
on a GPU, with CUDA graphs, where there is one.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from reference.hf import HfReference
from reference.talker.rig import DEVICE, HfTalker, make_engine
from triton_omni.checkpoint.config import load_config
from triton_omni.checkpoint.speakers import load_speakers
from triton_omni.core.settings import EngineSettings, ThinkerSettings
from triton_omni.session.engine import Sampling, ThinkerPrompt

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

# 8 bits of mantissa round by up to 0.4 %. 4 bits by up to 6 %, 2.6 % on average, inputs and weights both, in the four
# products of each of the tiny checkpoint's two layers: 2.6 % x sqrt(2 x 8) = 10 %, which is what an H200 gave.
RELATIVE_ERROR = {"none": 0.02, "fp8": 0.15}
ONE_TOKEN = Sampling(max_tokens=1)


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    return float((ours.float().cpu() - reference).norm() / reference.norm())


@pytest.mark.parametrize("text", ["hello", "Tell me about the sea. " * 8])
@pytest.mark.parametrize(
    "quantization",
    ["none", pytest.param("fp8", marks=pytest.mark.skipif(DEVICE.type == "cpu", reason="fp8 needs a GPU"))],
)
def test_thinker_rows_in_bfloat16(tiny_checkpoint: Path, hf: HfReference, text: str, quantization: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from triton_omni.vllm_hooks.thinker.engine import ThinkerVllmEngine

        sizes = EngineSettings(max_num_seqs=4, max_model_len=512, max_num_batched_tokens=512, threads=1)
        engine = ThinkerVllmEngine(
            tiny_checkpoint, ThinkerSettings(dtype="bfloat16", quantization=quantization, engine=sizes), DEVICE
        )
    chat = hf.render([{"role": "user", "content": [{"type": "text", "text": text}]}])
    ids = tuple(hf.processor.tokenizer(chat)["input_ids"])
    engine.add_sequence("a", engine.prepare(ThinkerPrompt(ids)), ONE_TOKEN, want_rows=True)
    rows = []
    while engine.has_work():
        rows += [output.rows for output in engine.step() if output.rows is not None]
    parts = engine._model.named_parameters()
    quantised = {name.split(".")[0] for name, part in parts if part.dtype == torch.float8_e4m3fn}
    assert quantised == ({"language_model"} if quantization == "fp8" else set())
    engine.close()
    ours = torch.cat(rows)
    assert ours.dtype == torch.bfloat16
    assert ours.device.type == DEVICE.type
    expected = hf.thinker(hf.ask(text), Sampling(max_tokens=2)).rows[: len(ids)]
    assert 0 < relative_error(ours, expected) < RELATIVE_ERROR[quantization]


def test_talker_logits_in_bfloat16(tiny_checkpoint: Path, hf: HfReference, monkeypatch: pytest.MonkeyPatch) -> None:
    talker: Any = HfTalker(hf.model)
    voice = load_speakers(tiny_checkpoint, load_config(tiny_checkpoint)).default.text_bos_id
    case = talker.case(3, 33, 9, voice, image=True)
    engine: Any = make_engine(tiny_checkpoint, dtype="bfloat16")
    runner = engine._core.model_executor.driver_worker.worker.model_runner
    seen: list[Tensor] = []
    adjust = runner.step.adjust
    monkeypatch.setattr(
        runner.step, "adjust", lambda logits, *rest: (seen.append(logits.clone()), adjust(logits, *rest))[1]
    )
    engine.open("a", case.prompt, ONE_TOKEN)
    engine.feed("a", case.rows.to(DEVICE, torch.bfloat16))
    engine.end("a")
    while engine.has_work():
        engine.step()
    engine.close()
    assert 0 < relative_error(seen[0][0], talker.prompt_logits(case)) < RELATIVE_ERROR["none"]
