# SPDX-License-Identifier: Apache-2.0
"""Steps with prompts as CUDA graphs against the same steps kernel by kernel, in the precision that a GPU serves.

Prompts of many lengths join a running batch at random steps, so that recorded steps hold prompts, pieces of prompts
and replies side by side, padded and not.
"""

from __future__ import annotations

import random
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from triton_omni.engine import Sampling, ThinkerPrompt
from triton_omni.settings import EngineSettings, ThinkerSettings

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there are CUDA graphs on a GPU only"),
]

PROMPTS = 96
REPLY = Sampling(max_tokens=12)
# Two orders of summation in bfloat16, whose 8 bits of mantissa round by up to 0.4 %.
RELATIVE_ERROR = 0.02


def make_engine(checkpoint: Path, dtype: Any, max_graph_tokens: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from triton_omni.vllm_hooks.thinker_engine import ThinkerVllmEngine

        sizes = EngineSettings(
            max_num_seqs=32, max_model_len=512, max_num_batched_tokens=512, max_graph_tokens=max_graph_tokens
        )
        return ThinkerVllmEngine(checkpoint, ThinkerSettings(dtype=dtype, engine=sizes), torch.device("cuda"))


def prompt_rows(engine: Any, prompts: list[tuple[int, ...]]) -> list[Tensor]:
    """Rows of each prompt; its reply's rows, whose tokens may differ where two are nearly equal, are left out."""
    dice, waiting, rows = random.Random(1), list(enumerate(prompts)), defaultdict(list)
    while waiting or engine.has_work():
        for _ in range(min(dice.choice((0, 0, 0, 1, 1, 2, 9)), len(waiting))):
            number, ids = waiting.pop()
            engine.add(str(number), engine.prepare(ThinkerPrompt(ids)), REPLY, want_rows=True)
        for output in engine.step():
            assert output.error is None
            if output.rows is not None:
                rows[int(output.key)].append(output.rows.cpu())
    return [torch.cat(rows[number])[: len(ids)].float() for number, ids in enumerate(prompts)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_recorded_steps_with_prompts_give_the_rows_of_unrecorded_ones(tiny_checkpoint: Path, dtype: str) -> None:
    dice = random.Random(0)
    prompts = [tuple(dice.choices(range(256), k=dice.choice((3, 17, 31, 32, 33, 100, 300)))) for _ in range(PROMPTS)]
    recorded, plain = (make_engine(tiny_checkpoint, dtype, tokens) for tokens in (512, 0))
    for ours, expected in zip(prompt_rows(recorded, prompts), prompt_rows(plain, prompts), strict=True):
        assert torch.isfinite(ours).all()
        assert (ours - expected).norm() / expected.norm() < (RELATIVE_ERROR if dtype == "bfloat16" else 1e-4)
    recorded.close()
    plain.close()
