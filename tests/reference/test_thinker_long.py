# SPDX-License-Identifier: Apache-2.0
"""A long chat with pictures and sounds: its reply is HF's, and a step after 3000 positions costs no more."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from media_samples import picture, tone
from reference.hf import HfReference
from reference.thinker_rig import Answer, ask, assert_equals_hf, drain, make_engine
from triton_omni.session.engine import Sampling, ThinkerPrompt

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

REPLY = Sampling(max_tokens=40, min_tokens=40)
LONG_TOLERANCE = 2e-4
"""Three times what 3000 positions of summation order made of rows of the order of 1."""
SHOWN, HEARD = (0, 16, 32), (8, 24, 40)
"""Turns of the user with a picture, and with a sound."""
PICTURES = [Image.fromarray(picture(112 + 28 * number, 84)) for number in range(len(SHOWN))]
SOUNDS = [tone(0.4 + 0.3 * number, hertz=300 + 200 * number) for number in range(len(HEARD))]


def turn_of(number: int) -> dict[str, Any]:
    """One message of the long chat."""
    kind = "image" if number in SHOWN else "audio" if number in HEARD else None
    media = [] if kind is None else [{"type": kind}]
    text = f"{number}: tell me more about the sea, please. " * 2
    return {"role": ("user", "assistant")[number % 2], "content": [*media, {"type": "text", "text": text}]}


CHAT = [turn_of(number) for number in range(41)]


def watch_steps(engine: Any) -> list[dict[str, int]]:
    """Return a list that gets each later step's number of tokens by sequence."""
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
    ids = tuple(hf.processor.tokenizer(hf.render(CHAT))["input_ids"])
    prompt = ThinkerPrompt(ids, {"image": PICTURES, "audio": SOUNDS})
    assert len(prompt.token_ids) > 2900
    for key, asked in {"long": prompt, "short": ask(hf, "hello")}.items():
        engine.add_sequence(key, engine.prepare(asked), REPLY, want_rows=True)
    answers = drain(engine, {"long": Answer(), "short": Answer()})
    engine.close()
    expected = hf.thinker(hf.prepare(CHAT, images=PICTURES, audios=SOUNDS), REPLY)
    assert_equals_hf(answers["long"], expected, LONG_TOLERANCE)
    # A row and a token a step, whatever came before; nothing is computed twice.
    computed = list(accumulate(share.get("long", 0) for share in shares))
    prefilled = computed.index(len(answers["long"].rows) - (REPLY.max_tokens - 1))
    assert [share["long"] for share in shares[prefilled + 1 :] if share] == [1] * (REPLY.max_tokens - 1)
    rows = [len(output.rows) for output in answers["long"].outputs if output.rows is not None]
    assert rows[-(REPLY.max_tokens - 1) :] == [1] * (REPLY.max_tokens - 1)
