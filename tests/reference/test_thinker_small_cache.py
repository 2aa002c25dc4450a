# SPDX-License-Identifier: Apache-2.0
"""A cache that does not hold two of the thinker's sequences at their ends: one is preempted, and harms nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from media_samples import tone
from reference.hf import HfReference
from reference.thinker_rig import NOTHING_HELD, REPLY, Answer, ask, assert_equals_hf, drain, engine_of, token_ids
from reference.vllm_records import preemptions
from triton_omni.session.engine import Sampling, ThinkerPrompt

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

AUDIO = {"type": "audio"}
STAYS, LEAVES = "what is the weather like in Paris today?", "a" * 100
"""The later of two with the same priority is preempted."""


@pytest.fixture(params=[False, True], ids=["step by step", "incremental"])
def engine(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> Iterator[Any]:
    sizes = {"max_model_len": 256, "max_num_seqs": 2, "kv_cache_tokens": 256}
    with engine_of(tiny_checkpoint, ahead=request.param, **sizes) as made:
        yield made
        assert made.stats() == NOTHING_HELD


def caches(engine: Any) -> list[torch.Tensor]:
    """Each layer's cache, its first dimension the blocks."""
    runner = engine._runner
    return [torch.unflatten(cache, 0, (runner.kv_cache_config.num_blocks, -1)) for cache in runner.kv_caches]


def step_until_preempted(engine: Any, answers: Mapping[str, Answer], when: Callable[[str], None]) -> None:
    """Step until a sequence is preempted, and a step after; `when` is told its id at the moment."""
    with preemptions(engine, when) as preempted:
        while not preempted:
            assert engine.has_work()
            step(engine, answers)
    assert [engine._keys[request_id] for request_id in preempted] == [LEAVES]


def step(engine: Any, answers: Mapping[str, Answer]) -> None:
    for output in engine.step():
        answers[output.key].outputs.append(output)


def begin(engine: Any, hf: HfReference, sampling: Sampling = REPLY) -> dict[str, Answer]:
    for text in (STAYS, LEAVES):
        engine.add_sequence(text, engine.prepare(ask(hf, text)), sampling, want_rows=True)
    return {STAYS: Answer(), LEAVES: Answer()}


def test_the_end_of_a_preempted_sequence_leaves_the_blocks_of_others(engine: Any, hf: HfReference) -> None:
    answers = begin(engine, hf)
    step_until_preempted(engine, answers, lambda _: None)
    # Until the other one has written to a block that the preempted one had.
    for _ in range(4):
        step(engine, answers)
    before = [cache.clone() for cache in caches(engine)]
    engine.abort(LEAVES)
    assert all(torch.equal(one, other) for one, other in zip(before, caches(engine), strict=True))
    drain(engine, answers)
    assert_equals_hf(answers[STAYS], hf.thinker(hf.ask(STAYS), REPLY))


def test_what_a_preempted_sequence_wrote_is_gone_before_its_blocks_are_another_s(engine: Any, hf: HfReference) -> None:
    def spoil(request_id: str) -> None:
        """Write NaN, as a step under way may whose result was not read yet."""
        (blocks,) = engine._runner.requests[request_id].block_ids
        with torch.inference_mode():
            for cache in caches(engine):
                cache[blocks] = float("nan")

    answers = begin(engine, hf)
    step_until_preempted(engine, answers, spoil)
    assert not any(cache.isnan().any() for cache in caches(engine))
    drain(engine, answers)
    for text, answer in answers.items():
        assert_equals_hf(answer, hf.thinker(hf.ask(text), REPLY))


def test_rows_that_were_given_are_not_held_again_behind_those_that_a_stop_string_may_take(
    engine: Any, hf: HfReference
) -> None:
    # 16 characters may always begin one that never comes.
    asked, held = replace(REPLY, stop=("\0" * 17,)), []
    answers = begin(engine, hf, asked)
    step_until_preempted(engine, answers, lambda _: held.append(engine.stats().rows_used))
    while engine.has_work():
        step(engine, answers)
        held.append(engine.stats().rows_used)
    # A row a character of either sequence, and what a step or two under way add.
    assert 0 < max(held) <= 2 * 20
    for text, answer in answers.items():
        assert_equals_hf(answer, hf.thinker(hf.ask(text), REPLY))


def test_a_preempted_sequence_s_media_are_encoded_again(engine: Any, hf: HfReference) -> None:
    long = replace(REPLY, min_tokens=REPLY.max_tokens)
    question, sound = {"type": "text", "text": "what?" * 3}, tone(1.3)
    prompts = {STAYS: ask(hf, STAYS), LEAVES: ThinkerPrompt(token_ids(hf, AUDIO, question), {"audio": [sound]})}
    for key, prompt in prompts.items():
        engine.add_sequence(key, engine.prepare(prompt), long, want_rows=True)
    answers = {key: Answer() for key in prompts}
    step_until_preempted(engine, answers, lambda _: None)
    drain(engine, answers)
    heard = hf.prepare([{"role": "user", "content": [AUDIO, question]}], audios=[sound])
    assert_equals_hf(answers[LEAVES], hf.thinker(heard, long))
    assert_equals_hf(answers[STAYS], hf.thinker(hf.ask(STAYS), long))
    assert not engine._runner.encoder_cache
