# SPDX-License-Identifier: Apache-2.0
"""Steps keep an interval beside many listeners, and none while anybody waits for text, a row or first codes."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from thinker_sessions import PROMPT, FakeLedger, session
from triton_omni.core.policy_settings import TalkerPolicy, ThinkerPolicy
from triton_omni.policy.rules import (
    CODE_NS,
    FEW_WRITTEN,
    MANY_SESSIONS,
    ROWS_AHEAD,
    talker_interval_ns,
    thinker_interval_ns,
)
from triton_omni.session.wire import ThinkerReport
from triton_omni.thinker.open_session import OpenSession

LIMIT, FIRST, MANY, NOW = 12_000_000, 24, MANY_SESSIONS + 1, 7_000_000_000
REPORT = ThinkerReport(finish_reason="stop", prompt_tokens=PROMPT, reply_tokens=3, first_token_ns=1, finished_ns=2)


@pytest.mark.parametrize(
    ("sessions", "rows_ahead", "interval_ns"),
    [
        pytest.param(MANY, [ROWS_AHEAD], LIMIT, id="ahead of its sound"),
        pytest.param(MANY, [ROWS_AHEAD] * FEW_WRITTEN, LIMIT, id="a few"),
        pytest.param(MANY, [ROWS_AHEAD] * (FEW_WRITTEN + 1), 0, id="many are written"),
        pytest.param(MANY, [ROWS_AHEAD, ROWS_AHEAD - 1], 0, id="one has too little text"),
        pytest.param(MANY, [ROWS_AHEAD, -1], 0, id="one has no first window, or is read"),
        pytest.param(MANY, [], 0, id="nothing is written"),
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


def with_first_window(rows: int = FIRST + 5, **request: object) -> OpenSession:
    """A session whose first window's codes token2wav has had since `NOW`."""
    ledger, one = FakeLedger(), session(rows=rows, **{"max_rows": 1000, **request})
    for ledger.wants[0] in (FIRST, FIRST + 12):
        one.first_window_ready_ns(ledger, 0, NOW)
    return one


def test_rows_ahead_are_those_after_the_first_window() -> None:
    ledger, one = FakeLedger(), session(rows=FIRST + 5)
    assert one.rows_ahead(NOW) == -1, "nobody has said yet how many a window needs"
    ledger.wants[0] = FIRST
    one.first_window_ready_ns(ledger, 0, NOW)
    assert one.rows_ahead(NOW + 1_000_000_000) == 5, "nothing plays yet"
    one.send_queue.held += 2
    assert one.rows_ahead(NOW) == 7, "those that have not left count"


def test_rows_that_the_sound_has_played_are_not_ahead() -> None:
    one = with_first_window()
    found = [one.rows_ahead(NOW + played * CODE_NS) for played in (0, 1, 5, 8)]
    assert found == [5, 4, 0, -3]


def test_after_the_last_row_none_is_ahead() -> None:
    one = with_first_window()
    one.send_queue.finish_tensors()
    assert one.rows_ahead(NOW) == -1, "text or a call may follow, for which a client waits"


def test_a_reply_without_speech_is_never_ahead() -> None:
    one = session(rows=FIRST + 5, want_audio=False)
    one.first_wanted = FIRST
    assert one.rows_ahead(NOW) == -1


def test_a_reply_that_is_not_written_has_no_rows_ahead() -> None:
    done, gone, new = (session(rows=FIRST + 5) for _ in range(3))
    done.report, gone.ended_ns, new.session = REPORT, 1, None
    assert [one.rows_ahead(NOW) for one in (done, gone, new)] == [None] * 3


@pytest.mark.parametrize(("policy", "most"), [(ThinkerPolicy, 15), (TalkerPolicy, 8)])
def test_no_interval_is_so_long_that_sound_catches_up(policy: type[ThinkerPolicy | TalkerPolicy], most: int) -> None:
    assert policy(interval_ms=most)
    with pytest.raises(ValidationError, match="interval_ms"):
        policy(interval_ms=most + 1)
