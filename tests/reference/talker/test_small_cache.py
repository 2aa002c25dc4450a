# SPDX-License-Identifier: Apache-2.0
"""A cache that does not hold all sequences at their longest: who has to wait is computed again, and speaks the same."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from reference.talker.rig import GREEDY, SAMPLED, assert_nothing_held, make_engine, speak

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed.reduce_op.*:FutureWarning")


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "scheduled ahead"])
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
