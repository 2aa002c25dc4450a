# SPDX-License-Identifier: Apache-2.0
"""A long chat: its reply is HF's, and a step behind 3000 positions does what a step behind a few does."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from reference.hf import HfReference
from reference.thinker_rig import Answer, ask, assert_equals_hf, drain, make_engine
from triton_omni.engine import Sampling, ThinkerPrompt

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

REPLY = Sampling(max_tokens=40, min_tokens=40)
LONG_TOLERANCE = 2e-4
"""Three times what 3000 positions of summation order made of rows of the order of 1."""
CHAT = [
    {"role": ("user", "assistant")[turn % 2], "content": f"{turn}: tell me more about the sea, please. " * 2}
    for turn in range(41)
]


def watch_steps(engine: Any) -> list[dict[str, int]]:
    """How many tokens each step that is scheduled from now on has of which sequence."""
    scheduler, shares = engine._core.scheduler, []
    schedule = scheduler.schedule

    def noted(*arguments: Any) -> Any:
        step = schedule(*arguments)
        shares.append({name.rsplit("-", 1)[0]: count for name, count in step.num_scheduled_tokens.items()})
        return step

    scheduler.schedule = noted
    return shares


def test_a_long_chat_gives_hf_tokens_and_rows_in_steps_of_one_token(tiny_checkpoint: Path, hf: HfReference) -> None:
    engine = make_engine(tiny_checkpoint, max_model_len=4096, max_num_batched_tokens=512)
    shares = watch_steps(engine)
    prompt = ThinkerPrompt(tuple(hf.processor.tokenizer(hf.render(CHAT))["input_ids"]))
    assert len(prompt.token_ids) > 2900
    for key, asked in {"long": prompt, "short": ask(hf, "hello")}.items():
        engine.add(key, engine.prepare(asked), REPLY, want_rows=True)
    answers = drain(engine, {"long": Answer(), "short": Answer()})
    engine.close()
    assert_equals_hf(answers["long"], hf.thinker(hf.prepare(CHAT), REPLY), LONG_TOLERANCE)
    # A row and a token a step, whatever lies behind it; nothing is computed twice.
    computed = list(accumulate(share.get("long", 0) for share in shares))
    prefilled = computed.index(len(answers["long"].rows) - (REPLY.max_tokens - 1))
    assert [share["long"] for share in shares[prefilled + 1 :] if share] == [1] * (REPLY.max_tokens - 1)
    rows = [len(output.rows) for output in answers["long"].outputs if output.rows is not None]
    assert rows[-(REPLY.max_tokens - 1) :] == [1] * (REPLY.max_tokens - 1)
