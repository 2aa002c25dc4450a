# SPDX-License-Identifier: Apache-2.0
"""The talker's steps keep apart where many are served, unless somebody's first codes can be brought nearer."""

from __future__ import annotations

import pytest

from thinker_sessions import FakeLedger
from triton_omni.policy.device_claim import MANY_SESSIONS
from triton_omni.talker.minimum_interval import APART_NS, AWAITED, LONGEST_APART_NS, MinimumInterval

NOW = 7_000_000_000
MANY = MANY_SESSIONS + 100


@pytest.fixture
def ledger():
    return FakeLedger()


@pytest.fixture
def spacing(ledger):
    spacing = MinimumInterval(ledger)
    spacing.begin(NOW)
    return spacing


@pytest.mark.parametrize(
    ("sessions", "is_awaited", "apart_ns"),
    [
        pytest.param(MANY, False, LONGEST_APART_NS, id="heard"),
        pytest.param(MANY, True, AWAITED * LONGEST_APART_NS, id="awaited"),
        pytest.param(MANY_SESSIONS + 1, False, APART_NS, id="one more than few"),
        pytest.param(MANY_SESSIONS + 2, True, AWAITED * 2 * APART_NS, id="two more, awaited"),
    ],
)
def test_a_step_begins_so_long_after_the_last(spacing, sessions, is_awaited, apart_ns):
    def is_early(now_ns):
        return spacing.is_early(sessions, is_awaited=is_awaited, has_row=lambda: False, now_ns=now_ns)

    assert is_early(NOW + apart_ns - 1)
    assert not is_early(NOW + apart_ns)
    spacing.begin(NOW + apart_ns)
    assert is_early(NOW + apart_ns)


def test_nobody_whose_first_codes_a_step_brings_waits_for_it(spacing):
    assert not spacing.is_early(MANY, is_awaited=True, has_row=lambda: True, now_ns=NOW + 1)


def test_steps_of_few_keep_close(spacing):
    assert not spacing.is_early(MANY_SESSIONS, is_awaited=False, has_row=lambda: False, now_ns=NOW + 1)


def test_steps_keep_close_on_a_device_that_token2wav_has_not(spacing, ledger):
    ledger.shared = False
    assert not spacing.is_early(MANY, is_awaited=False, has_row=lambda: False, now_ns=NOW + 1)
