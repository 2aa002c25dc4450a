# SPDX-License-Identifier: Apache-2.0
"""The thinker pauses while first windows wait only for later stages, and never while one needs a step."""

from __future__ import annotations

import pytest
import torch

from thinker_sessions import PROMPT, FakeLedger, session
from triton_omni.policy.rules import must_pause
from triton_omni.session.wire import ThinkerReport

FIRST, NOW, LIMIT = 24, 7_000_000_000, 150_000_000
REPORT = ThinkerReport(finish_reason="stop", prompt_tokens=PROMPT, reply_tokens=3, first_token_ns=1, finished_ns=2)


@pytest.mark.parametrize(
    ("ready", "pauses"),
    [
        pytest.param([], False, id="no first window is pending"),
        pytest.param([NOW], True, id="all rows are there"),
        pytest.param([NOW - LIMIT + 1], True, id="within the limit"),
        pytest.param([NOW - LIMIT], False, id="at the limit"),
        pytest.param([0], False, id="a row is missing"),
        pytest.param([NOW, 0], False, id="a row of another is missing"),
        pytest.param([NOW - LIMIT, NOW], True, id="one has had its pause, another has not"),
        pytest.param([NOW - LIMIT, 0], False, id="one has had its pause, another needs a row"),
    ],
)
def test_when_the_thinker_pauses(ready: list[int], pauses: bool) -> None:
    assert must_pause(ready, NOW, LIMIT) is pauses


def test_a_limit_of_zero_never_pauses() -> None:
    assert not must_pause([NOW], NOW, 0)


@pytest.fixture
def ledger() -> FakeLedger:
    return FakeLedger()


def since(one, ledger, steps=0, now=NOW):
    return one.first_window_ready_ns(ledger, steps, now)


def test_a_first_window_is_ready_with_its_last_row(ledger):
    ledger.wants[0] = FIRST
    assert since(session(rows=FIRST - 1), ledger) == 0
    assert since(session(rows=FIRST), ledger) == NOW


def test_a_row_of_a_step_in_flight_needs_no_further_step(ledger):
    ledger.wants[0] = FIRST
    assert since(session(rows=FIRST - 2), ledger, steps=1) == 0
    assert since(session(rows=FIRST - 1), ledger, steps=1) == NOW


def test_it_stays_ready_from_the_first_moment_on(ledger):
    ledger.wants[0], one = FIRST, session(rows=FIRST)
    assert since(one, ledger) == NOW
    assert since(one, ledger, now=NOW + LIMIT) == NOW


def test_later_windows_are_not_waited_for(ledger):
    ledger.wants[0], one = FIRST, session(rows=FIRST)
    assert since(one, ledger) == NOW
    ledger.wants[0] = FIRST + 12
    assert since(one, ledger) is None
    one.send_queue.put(torch.zeros(12, 2))
    one.send_queue.pop_batch(1)
    assert since(one, ledger) is None


@pytest.mark.parametrize(
    ("other", "wants"),
    [
        pytest.param({"rows": FIRST - 1}, FIRST, id="a row is missing"),
        pytest.param({}, None, id="token2wav has not opened it"),
        pytest.param({"want_audio": False}, None, id="a text has not begun"),
    ],
)
def test_what_needs_a_step(ledger, other, wants):
    if wants is not None:
        ledger.wants[1] = wants
    assert since(session(slot=1, **other), ledger) == 0


def test_what_needs_none(ledger):
    written, gone, read, new = (session(slot=slot) for slot in range(1, 5))
    written.report = REPORT
    gone.ended_ns = 1
    read = session(slot=3, want_audio=False)
    read.first_token_ns = 1
    new.session = None
    assert [since(one, ledger) for one in (written, gone, read, new)] == [None] * 4


def test_a_whole_reply_is_not_waited_for(ledger):
    ledger.wants[0] = (1 << 32) - 1
    assert since(session(), ledger) is None


def test_text_is_read_until_its_reply_is_decoded():
    one = session(slot=1, want_audio=False)
    assert one.is_read
    one.report = REPORT
    assert not one.is_read
    ended = session(slot=1, want_audio=False)
    ended.ended_ns = NOW
    assert not ended.is_read
    assert not session().is_read
