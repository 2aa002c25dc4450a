# SPDX-License-Identifier: Apache-2.0
"""The end of a server, with sessions that end when the test says so."""

from __future__ import annotations

import time

import pytest

from triton_omni.session.ledger_table import DRAINING, ENDING, LEAVING, Field
from triton_omni.supervisor.options import parse_options
from triton_omni.supervisor.readiness import drain, end_sessions

LONG_S = 6000.0
"""Longer than a test may take."""


class Sessions:
    """Numbers of open sessions, one for each look; the last one stays."""

    def __init__(self, *open_sessions: int) -> None:
        self.found = list(open_sessions)
        self.told: list[int] = []

    def set_word(self, declared: Field, value: int) -> None:
        assert declared is LEAVING
        self.told.append(value)

    def open_sessions(self) -> int:
        return self.found.pop(0) if len(self.found) > 1 else self.found[0]


def never() -> bool:
    return False


@pytest.mark.parametrize(("act", "told"), [(drain, DRAINING), (end_sessions, ENDING)])
def test_the_wait_ends_some_moments_after_the_last_session(act: object, told: int) -> None:
    sessions, begin = Sessions(2, 1, 0, 1, 0), time.monotonic()
    assert act(sessions, LONG_S, never)  # type: ignore[operator]
    assert time.monotonic() - begin > 0.3
    assert (sessions.found, sessions.told) == ([0], [told])


def test_sessions_that_do_not_end_are_not_waited_for_any_longer() -> None:
    begin = time.monotonic()
    assert not drain(Sessions(1), 0.3, never)
    assert time.monotonic() - begin >= 0.3


def test_no_time_at_all_still_lets_what_is_over_leave() -> None:
    assert drain(Sessions(0), 0.0, never)


def test_whoever_gives_up_ends_the_wait() -> None:
    asked = iter([False, False, True])
    assert not drain(Sessions(1), LONG_S, lambda: next(asked))


@pytest.mark.parametrize("given", ["-1", "nan", "inf", "soon"])
def test_a_drain_timeout_that_is_none_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--model-repository", "x", f"--drain-timeout={given}"])
    told = f"error: argument --drain-timeout: {given} is no number of seconds from 0 on\n"
    assert capsys.readouterr().err == told


def test_a_drain_timeout_is_taken() -> None:
    assert parse_options(["--model-repository", "x"]).drain_timeout_s == 30
    assert parse_options(["--model-repository", "x", "--drain-timeout", "0.5"]).drain_timeout_s == 0.5
