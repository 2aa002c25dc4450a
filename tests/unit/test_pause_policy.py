# SPDX-License-Identifier: Apache-2.0
"""The thinker rests while first windows are on their way, and never while anybody waits for a row or a first word."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from thinker_sessions import PROMPT, FakeLedger, session
from triton_omni.session.wire import ThinkerReport
from triton_omni.thinker.pause_policy import LONGEST_REST_NS, TEXT_REST_NS, PausePolicy

FIRST = 24
NOW = 7_000_000_000


@pytest.fixture
def ledger():
    return FakeLedger()


@pytest.fixture
def engine():
    return SimpleNamespace(steps_under_way=0)


@pytest.fixture
def rest(ledger, engine):
    return PausePolicy(ledger, engine)


def test_it_rests_once_the_first_window_has_all_its_rows(rest, ledger):
    ledger.wants[0] = FIRST
    assert not rest.is_due([session(rows=FIRST - 1)], NOW)
    assert rest.is_due([session(rows=FIRST)], NOW)


def test_a_row_of_a_step_under_way_needs_no_step_more(rest, ledger, engine):
    ledger.wants[0], engine.steps_under_way = FIRST, 1
    assert not rest.is_due([session(rows=FIRST - 2)], NOW)
    assert rest.is_due([session(rows=FIRST - 1)], NOW)


def test_it_goes_on_when_the_codes_have_come_and_rests_no_more_for_later_windows(rest, ledger):
    one = session(rows=FIRST)
    ledger.wants[0] = FIRST
    assert rest.is_due([one], NOW)
    ledger.wants[0] = FIRST + 12
    assert not rest.is_due([one], NOW + 1)
    one.send_queue.put(torch.zeros(12, 2))
    one.send_queue.take(1)
    assert not rest.is_due([one], NOW + 2)


def test_rows_that_complete_the_first_window_are_known(rest, ledger):
    one = session(rows=FIRST - 4)
    one.send_queue.put(torch.zeros(3, 2))
    assert not rest.completes_first_window(one), "token2wav has not said what it wants"
    ledger.wants[0] = FIRST
    assert not rest.completes_first_window(one)
    one.send_queue.put(torch.zeros(1, 2))
    assert rest.completes_first_window(one)
    one.send_queue.put(torch.zeros(2, 2))
    assert rest.completes_first_window(one)
    one.send_queue.take(1)
    assert not rest.completes_first_window(one), "they have left"
    one.send_queue.put(torch.zeros(1, 2))
    assert not rest.completes_first_window(one)


def test_a_first_window_whose_last_row_has_left_lacks_none(rest, ledger):
    ledger.wants[0] = FIRST
    one = session(rows=FIRST)
    one.send_queue.put(torch.zeros(1, 2))
    assert not rest.completes_first_window(one)


@pytest.mark.parametrize("told", [{"want_audio": False}, {"max_rows": FIRST - 1}])
def test_who_has_no_first_window_completes_none(rest, ledger, told):
    ledger.wants[0] = FIRST
    one = session(**told)
    one.first_token_ns = NOW
    one.send_queue.put(torch.zeros(FIRST, 2))
    assert not rest.completes_first_window(one)


def test_it_rests_no_longer_than_its_limit(rest, ledger):
    ledger.wants[0] = FIRST
    one = session(rows=FIRST)
    assert rest.is_due([one], NOW)
    assert rest.is_due([one], NOW + LONGEST_REST_NS - 1)
    assert not rest.is_due([one], NOW + LONGEST_REST_NS)
    assert not rest.is_due([one], NOW + 10 * LONGEST_REST_NS)


def test_who_has_had_a_whole_rest_gets_none_with_others(rest, ledger):
    """A listener for whom the talker has no place keeps nobody's text back again and again."""
    ledger.wants = {0: FIRST, 1: FIRST}
    waiting, later = session(rows=FIRST), session(slot=1)
    assert rest.is_due([waiting], NOW)
    assert not rest.is_due([waiting], NOW + LONGEST_REST_NS)
    assert not rest.is_due([waiting, later], NOW + LONGEST_REST_NS + 1)
    later.send_queue.put(torch.zeros(FIRST, 2))
    begun = NOW + 2 * LONGEST_REST_NS
    assert rest.is_due([waiting, later], begun)
    ledger.wants[1] = FIRST + 12
    assert not rest.is_due([waiting, later], begun + 1)


def test_it_rests_for_a_moment_alone_while_somebody_reads(rest, ledger):
    ledger.wants[0] = FIRST
    both = [session(rows=FIRST), session(slot=1, want_audio=False)]
    both[1].first_token_ns = NOW
    assert rest.is_due(both, NOW)
    assert rest.is_due(both, NOW + TEXT_REST_NS - 1)
    assert not rest.is_due(both, NOW + TEXT_REST_NS)
    both[1].ended_ns = NOW
    assert rest.is_due(both, NOW + TEXT_REST_NS), "the reader has all"


def test_a_text_that_is_written_wants_no_shorter_rest(rest, ledger):
    ledger.wants[0] = FIRST
    listener, reader = session(rows=FIRST), session(slot=1, want_audio=False)
    reader.report = ThinkerReport(
        finish_reason="stop", prompt_tokens=PROMPT, reply_tokens=3, first_token_ns=1, finished_ns=2
    )
    assert rest.is_due([listener, reader], NOW)
    assert rest.is_due([listener, reader], NOW + TEXT_REST_NS)


def test_who_comes_later_has_a_rest_of_his_own(rest, ledger):
    ledger.wants = {0: FIRST, 1: FIRST}
    first, later = session(rows=FIRST), session(slot=1)
    assert rest.is_due([first], NOW)
    assert not rest.is_due([first, later], NOW + 1)
    ledger.wants[0] = FIRST + 12
    later.send_queue.put(torch.zeros(FIRST, 2))
    assert rest.is_due([first, later], NOW + 10 * LONGEST_REST_NS)


def test_whoever_wants_the_whole_reply_at_once_is_not_waited_for(rest, ledger):
    ledger.wants = {0: FIRST, 1: (1 << 32) - 1}
    assert not rest.is_due([session(slot=1)], NOW)
    assert rest.is_due([session(rows=FIRST), session(slot=1)], NOW)


@pytest.mark.parametrize(
    ("other", "wants"),
    [
        pytest.param({"rows": FIRST - 1}, FIRST, id="a row is missing"),
        pytest.param({}, None, id="token2wav has not opened it"),
        pytest.param({"want_audio": False}, None, id="a text has not begun"),
    ],
)
def test_it_goes_on_while_somebody_waits_for_it(rest, ledger, other, wants):
    ledger.wants = {0: FIRST} | ({} if wants is None else {1: wants})
    assert rest.is_due([session(rows=FIRST)], NOW)
    assert not rest.is_due([session(rows=FIRST), session(slot=1, **other)], NOW + 1)


def test_who_needs_nothing_of_it_does_not_keep_it_from_resting(rest, ledger):
    ledger.wants[0] = FIRST
    written, gone, read, new = (session(slot=slot) for slot in range(1, 5))
    written.report = ThinkerReport(
        finish_reason="stop", prompt_tokens=PROMPT, reply_tokens=3, first_token_ns=1, finished_ns=2
    )
    gone.ended_ns = 1
    read = session(slot=3, want_audio=False)
    read.first_token_ns = 1
    new.session = None
    assert rest.is_due([session(rows=FIRST), written, gone, read, new], NOW)


def test_it_does_not_rest_for_a_device_that_is_another(rest, ledger):
    ledger.wants[0], ledger.shared = FIRST, False
    assert not rest.is_due([session(rows=FIRST)], NOW)
