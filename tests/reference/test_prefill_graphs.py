# SPDX-License-Identifier: Apache-2.0
"""Steps with prompts as CUDA graphs against the same steps kernel by kernel, in the precision that a GPU serves.

Prompts of many lengths join a running batch at random steps. So recorded steps hold prompts, pieces of prompts and
replies side by side, padded and not.
"""

from __future__ import annotations

import random
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from media_samples import picture, tone
from reference.hf import HfReference
from reference.thinker_rig import token_ids
from triton_omni.core.settings import EngineSettings, ThinkerSettings
from triton_omni.session.engine import Sampling, ThinkerPrompt

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there are CUDA graphs on a GPU only"),
]

PROMPTS = 96
LONGEST = 2048
"""Tokens of a step that is recorded, and of a sequence."""
REPLY = Sampling(max_tokens=12)
# Two orders of summation in bfloat16, whose 8 bits of mantissa round by up to 0.4 %.
RELATIVE_ERROR = 0.02


def make_engine(checkpoint: Path, dtype: Any, max_graph_tokens: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from triton_omni.vllm_hooks.thinker.engine import ThinkerVllmEngine

        sizes = EngineSettings(max_model_len=LONGEST, max_graph_tokens=max_graph_tokens)
        return ThinkerVllmEngine(checkpoint, ThinkerSettings(dtype=dtype, engine=sizes), torch.device("cuda"))


def some_prompts(hf: HfReference) -> list[ThinkerPrompt]:
    """Texts of a few to 1,800 tokens, and among them an image of 999 tokens and a sound of 500."""
    dice = random.Random(0)
    lengths = (3, 17, 31, 32, 33, 100, 300, 700, 1800)
    prompts = [ThinkerPrompt(tuple(dice.choices(range(256), k=dice.choice(lengths)))) for _ in range(PROMPTS)]
    media = {"image": Image.fromarray(picture(1024, 768)), "audio": tone(20)}
    for place, (kind, medium) in zip((20, 60), media.items(), strict=True):
        prompts[place] = ThinkerPrompt(token_ids(hf, {"type": kind}), {kind: [medium]})
    return prompts


def prompt_rows(engine: Any, prompts: list[ThinkerPrompt]) -> list[Tensor]:
    """Rows of each prompt; its reply's rows, whose tokens may differ where two are nearly equal, are left out."""
    placed = [engine.prepare(prompt) for prompt in prompts]
    dice, waiting, rows = random.Random(1), list(enumerate(placed)), defaultdict(list)
    while waiting or engine.has_work():
        for _ in range(min(dice.choice((0, 0, 0, 1, 1, 2, 9)), len(waiting))):
            number, prompt = waiting.pop()
            engine.add_sequence(str(number), prompt, REPLY, want_rows=True)
        for output in engine.step():
            assert output.error is None
            if output.rows is not None:
                rows[int(output.key)].append(output.rows.cpu())
    return [torch.cat(rows[number])[: len(prompt.prompt_token_ids)].float() for number, prompt in enumerate(placed)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_recorded_steps_with_prompts_give_the_rows_of_unrecorded_ones(
    tiny_checkpoint: Path, hf: HfReference, dtype: str
) -> None:
    prompts = some_prompts(hf)
    recorded, plain = (make_engine(tiny_checkpoint, dtype, tokens) for tokens in (LONGEST, 0))
    for ours, expected in zip(prompt_rows(recorded, prompts), prompt_rows(plain, prompts), strict=True):
        assert torch.isfinite(ours).all()
        assert (ours - expected).norm() / expected.norm() < (RELATIVE_ERROR if dtype == "bfloat16" else 1e-4)
    recorded.close()
    plain.close()
