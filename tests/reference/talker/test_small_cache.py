# SPDX-License-Identifier: Apache-2.0
"""A cache that does not hold all sequences at their longest: who has to wait is computed again, and speaks the same."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from reference.talker.rig import GREEDY, SAMPLED, Spoken, assert_nothing_held, make_engine, speak
from reference.vllm_records import preemptions

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed.reduce_op.*:FutureWarning")

LONG = replace(GREEDY, max_tokens=60, min_tokens=60)
WAYS = pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "scheduled ahead"])
TIMES, TURNS = 20, 10
"""Number of tries of a sequence that finds no block, and the turns of a loop between two of them."""


@WAYS
def test_a_sequence_that_is_computed_again_speaks_the_same_codes(tiny_checkpoint, cases, monkeypatch, ahead):
    large = make_engine(tiny_checkpoint, ahead=ahead, max_model_len=128)
    counted = replace(SAMPLED, frequency_penalty=0.7, presence_penalty=-0.3)
    samplings = [counted if number % 2 else GREEDY for number in range(len(cases))]
    expected = speak(large, cases, samplings)
    large.close()
    small = make_engine(tiny_checkpoint, ahead=ahead, max_model_len=128, kv_cache_tokens=320)
    preempt = mock.Mock(wraps=small._core.scheduler._preempt_request)
    monkeypatch.setattr(small._core.scheduler, "_preempt_request", preempt)
    assert speak(small, cases, samplings) == expected
    assert preempt.called
    assert_nothing_held(small)
    small.close()


@WAYS
def test_who_finds_no_cache_block_is_tried_now_and_then_while_the_others_wait_for_rows(
    tiny_checkpoint, talker, voices, monkeypatch, ahead
):
    from triton_omni.vllm_hooks.talker import schedulers
    from triton_omni.vllm_hooks.talker.schedulers import STARVED_S

    # Beside the rows of the one that waits, 192 tokens of the other find a place.
    small = make_engine(tiny_checkpoint, ahead=ahead, max_model_len=256, kv_cache_tokens=256)
    slow, long = talker.case(1, 60, 60, voices[0]), talker.case(2, 4, 2, voices[0])
    small.open("slow", slow.prompt, replace(GREEDY, max_tokens=100, min_tokens=100))
    small.feed("slow", slow.rows[:62])
    small.open("long", long.prompt, replace(GREEDY, max_tokens=220, min_tokens=220), priority=1)
    small.feed("long", long.rows)
    small.end("long")
    spoken = Spoken()
    for _ in range(300):
        if small.has_work():
            spoken.step(small)
    assert 180 < len(spoken.codes["long"]) < 220
    schedule = mock.Mock(wraps=small._core.scheduler.schedule)
    monkeypatch.setattr(small._core.scheduler, "schedule", schedule)
    now = itertools.count(time.monotonic(), STARVED_S / TURNS)
    with monkeypatch.context() as patch:
        for moment in itertools.islice(now, TIMES * TURNS):
            patch.setattr(schedulers, "time", SimpleNamespace(monotonic=lambda moment=moment: moment))
            if small.has_work():
                spoken.step(small)
    assert TIMES / 2 < schedule.call_count <= TIMES + 1
    small.feed("slow", slow.rows[62:])
    small.end("slow")
    spoken.drain(small)
    assert [len(spoken.codes[key]) for key in ("slow", "long")] == [100, 220]
    assert_nothing_held(small)
    small.close()


@pytest.fixture(params=[False, True], ids=["step by step", "scheduled ahead"])
def small(request, tiny_checkpoint):
    engine = make_engine(tiny_checkpoint, ahead=request.param, max_model_len=128, max_num_seqs=2, kv_cache_tokens=128)
    yield engine
    assert_nothing_held(engine)
    engine.close()


def begin(engine, cases):
    """Two sequences, of which the later one will be preempted."""
    for key in ("stays", "leaves"):
        engine.open(key, cases[2].prompt, LONG)
        engine.feed(key, cases[2].rows)
        engine.end(key)
    return Spoken()


def step_until_preempted(engine, spoken, when):
    """Step until a sequence is preempted, and a step after; `when` is told its id at the moment."""
    with preemptions(engine, when) as preempted:
        while not preempted:
            assert engine.has_work()
            spoken.step(engine)
    assert [engine._by_request[request_id].key for request_id in preempted] == ["leaves"]


def test_the_end_of_a_preempted_sequence_leaves_the_blocks_of_others(small, talker, cases):
    spoken = begin(small, cases)
    step_until_preempted(small, spoken, lambda _: None)
    # Until the other one has written to a block that the preempted one had.
    for _ in range(4):
        spoken.step(small)
    before = [cache.clone() for cache in small._runner.kv_caches]
    small.abort("leaves")
    assert all(torch.equal(one, other) for one, other in zip(before, small._runner.kv_caches, strict=True))
    assert spoken.drain(small).of("stays") == talker.codes(cases[2], LONG)


def test_what_a_preempted_sequence_wrote_is_gone_before_its_blocks_are_another_s(small, talker, cases):
    runner = small._runner

    def spoil(request_id):
        """Write NaN, as a step under way may whose result was not read yet."""
        (blocks,) = runner.requests[request_id].block_ids
        with torch.inference_mode():
            for cache in runner.kv_caches:
                torch.unflatten(cache, 0, (runner.kv_cache_config.num_blocks, -1))[blocks] = float("nan")

    spoken = begin(small, cases)
    step_until_preempted(small, spoken, spoil)
    assert not any(cache.isnan().any() for cache in runner.kv_caches)
    spoken.drain(small)
    assert [spoken.of(key) for key in ("stays", "leaves")] == [talker.codes(cases[2], LONG)] * 2
