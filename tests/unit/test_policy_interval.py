# SPDX-License-Identifier: Apache-2.0
"""Steps keep an interval beside many listeners, and none while anybody waits for text, a row or first codes."""

from __future__ import annotations

import pytest

from thinker_sessions import PROMPT, FakeLedger, session
from triton_omni.policy.rules import (
    FEW_WRITTEN,
    MANY_SESSIONS,
    ROWS_AHEAD,
    talker_interval_ns,
    thinker_interval_ns,
)
from triton_omni.session.wire import ThinkerReport

LIMIT, FIRST, MANY = 12_000_000, 24, MANY_SESSIONS + 1
REPORT = ThinkerReport(finish_reason="stop", prompt_tokens=PROMPT, reply_tokens=3, first_token_ns=1, finished_ns=2)


@pytest.mark.parametrize(
    ("sessions", "rows_ahead", "interval_ns"),
    [
        pytest.param(MANY, [ROWS_AHEAD], LIMIT, id="ahead of its sound"),
        pytest.param(MANY, [ROWS_AHEAD] * FEW_WRITTEN, LIMIT, id="a few"),
        pytest.param(MANY, [ROWS_AHEAD] * (FEW_WRITTEN + 1), 0, id="many are written"),
        pytest.param(MANY, [ROWS_AHEAD, ROWS_AHEAD - 1], 0, id="one has too little text"),
        pytest.param(MANY, [ROWS_AHEAD, -1], 0, id="one has no first window, or is read"),
        pytest.param(MANY_SESSIONS, [ROWS_AHEAD], 0, id="few listen"),
    ],
)
def test_thinker_steps_keep_an_interval_while_nobody_waits_for_a_row(
    sessions: int, rows_ahead: list[int], interval_ns: int
) -> None:
    assert thinker_interval_ns(sessions, rows_ahead, LIMIT) == interval_ns
    assert thinker_interval_ns(sessions, rows_ahead, 0) == 0


@pytest.mark.parametrize(
    ("sessions", "awaited", "interval_ns"),
    [
        pytest.param(MANY, [], LIMIT, id="all have sound"),
        pytest.param(MANY, [False, False], 2 * LIMIT, id="rows of first codes are missing"),
        pytest.param(MANY, [False, True], 0, id="the row of one is there"),
        pytest.param(MANY_SESSIONS, [], 0, id="few listen"),
        pytest.param(MANY_SESSIONS, [False], 0, id="few listen, one waits"),
    ],
)
def test_talker_steps_keep_an_interval_unless_they_bring_first_codes(
    sessions: int, awaited: list[bool], interval_ns: int
) -> None:
    assert talker_interval_ns(sessions, awaited, LIMIT) == interval_ns
    assert talker_interval_ns(sessions, awaited, 0) == 0


def test_rows_ahead_are_those_after_the_first_window() -> None:
    ledger, one = FakeLedger(), session(rows=FIRST + 5)
    assert one.rows_ahead == -1, "nobody has said yet how many a window needs"
    ledger.wants[0] = FIRST
    one.first_window_ready_ns(ledger, 0, 1)
    assert one.rows_ahead == 5
    one.send_queue.held += 2
    assert one.rows_ahead == 7, "those that have not left count"


def test_a_reply_without_speech_is_never_ahead() -> None:
    one = session(rows=FIRST + 5, want_audio=False)
    one.first_wanted = FIRST
    assert one.rows_ahead == -1


def test_a_reply_that_is_not_written_has_no_rows_ahead() -> None:
    done, gone, new = (session(rows=FIRST + 5) for _ in range(3))
    done.report, gone.ended_ns, new.session = REPORT, 1, None
    assert [one.rows_ahead for one in (done, gone, new)] == [None] * 3
