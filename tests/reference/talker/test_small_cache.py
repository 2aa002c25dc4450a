# SPDX-License-Identifier: Apache-2.0
"""A cache that does not hold all sequences at their longest: who has to wait is computed again, and speaks the same."""

from __future__ import annotations

import time
from dataclasses import replace
from unittest import mock

import pytest

from reference.talker.rig import GREEDY, SAMPLED, Spoken, assert_nothing_held, make_engine, speak

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed.reduce_op.*:FutureWarning")


WAYS = pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "scheduled ahead"])
TURNS_S = 0.5


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
    from triton_omni.vllm_hooks.waiting import STARVED_S

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
    end = time.monotonic() + TURNS_S
    while time.monotonic() < end:
        if small.has_work():
            spoken.step(small)
    assert 0 < schedule.call_count <= TURNS_S / STARVED_S + 1
    small.feed("slow", slow.rows[62:])
    small.end("slow")
    spoken.drain(small)
    assert [len(spoken.codes[key]) for key in ("slow", "long")] == [100, 220]
    assert_nothing_held(small)
    small.close()
