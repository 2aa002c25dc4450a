# SPDX-License-Identifier: Apache-2.0
"""The thinker's steps keep apart beside many listeners, and never while anybody waits for text or for a row."""

from __future__ import annotations

import pytest

from thinker_sessions import FakeLedger, session
from triton_omni.policy.device_claim import MANY_SESSIONS
from triton_omni.session.wire import ThinkerReport
from triton_omni.thinker.minimum_interval import APART_NS, ENOUGH_ROWS, FEW_WRITTEN, MinimumInterval

FIRST = 24
ENOUGH = FIRST + ENOUGH_ROWS
NOW = 7_000_000_000
DONE = ThinkerReport(finish_reason="stop", prompt_tokens=5, reply_tokens=3, first_token_ns=1, finished_ns=2)


def written(rows=ENOUGH, **request):
    one = session(rows=rows, **{"max_rows": 1000, **request})
    one.first_wanted = FIRST
    return one


def heard():
    one = session()
    one.report = DONE
    return one


LISTENERS = [heard() for _ in range(MANY_SESSIONS)]


@pytest.fixture
def ledger():
    return FakeLedger()


@pytest.fixture
def spacing(ledger):
    spacing = MinimumInterval(ledger)
    assert not spacing.is_early([*LISTENERS, written()], NOW)
    return spacing


def test_a_step_begins_so_long_after_the_last(spacing):
    sessions = [*LISTENERS, written()]
    assert spacing.is_early(sessions, NOW + 1)
    assert spacing.is_early(sessions, NOW + APART_NS - 1)
    assert not spacing.is_early(sessions, NOW + APART_NS)
    assert spacing.is_early(sessions, NOW + APART_NS + 1), "from that one on"


def test_it_is_reckoned_from_steps_that_did_not_wait(spacing):
    assert not spacing.is_early([*LISTENERS, written(rows=0)], NOW + 5_000_000)
    assert spacing.is_early([*LISTENERS, written()], NOW + APART_NS)


def test_rows_that_have_not_left_count(spacing):
    one = written(rows=ENOUGH - 1)
    assert not spacing.is_early([*LISTENERS, one], NOW + 1)
    one.send_queue.held += 1
    assert spacing.is_early([*LISTENERS, one], NOW + 2)


@pytest.mark.parametrize(
    "sessions",
    [
        pytest.param([*LISTENERS[1:], written()], id="few"),
        pytest.param([*LISTENERS, *(written() for _ in range(FEW_WRITTEN + 1))], id="many are written"),
        pytest.param([*LISTENERS, written(), written(rows=ENOUGH - 1)], id="one has too little text"),
        pytest.param([*LISTENERS, written(), session(rows=ENOUGH)], id="of one nobody knows what it wants"),
        pytest.param([*LISTENERS, written(), written(want_audio=False)], id="one is read"),
    ],
)
def test_none_waits_where_there_is_nothing_to_gain_or_somebody_waits(spacing, sessions):
    assert not spacing.is_early(sessions, NOW + 1)


def test_who_is_gone_or_was_not_told_to_the_stages_is_none_of_them(spacing):
    gone, new = written(rows=0), written(rows=0)
    gone.ended_ns, new.session = 1, None
    assert spacing.is_early([*LISTENERS, *(written() for _ in range(FEW_WRITTEN)), gone, new], NOW + 1)
    assert not spacing.is_early([*LISTENERS[1:], written(), gone, new][1:], NOW + 2)


def test_steps_keep_close_on_a_device_that_token2wav_has_not(spacing, ledger):
    ledger.shared = False
    assert not spacing.is_early([*LISTENERS, written()], NOW + 1)
