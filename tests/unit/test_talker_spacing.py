# SPDX-License-Identifier: Apache-2.0
"""The talker's steps keep apart where many are served, unless somebody's first codes can be brought nearer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from thinker_sessions import FakeLedger
from triton_omni.precedence import MANY_SESSIONS
from triton_omni.talker.spacing import APART_NS, AWAITED, LONGEST_APART_NS, Spacing

NOW = 7_000_000_000
MANY = MANY_SESSIONS + 100
WITHOUT_ROW, WITH_ROW = SimpleNamespace(has_row=False), SimpleNamespace(has_row=True)


@pytest.fixture
def ledger():
    return FakeLedger()


@pytest.fixture
def spacing(ledger):
    spacing = Spacing(ledger)
    spacing.begin(NOW)
    return spacing


@pytest.mark.parametrize(
    ("sessions", "awaiting", "apart_ns"),
    [
        pytest.param(MANY, [], LONGEST_APART_NS, id="heard"),
        pytest.param(MANY, [WITHOUT_ROW, WITHOUT_ROW], AWAITED * LONGEST_APART_NS, id="awaited"),
        pytest.param(MANY_SESSIONS + 1, [], APART_NS, id="one more than few"),
        pytest.param(MANY_SESSIONS + 2, [WITHOUT_ROW], AWAITED * 2 * APART_NS, id="two more, awaited"),
    ],
)
def test_a_step_begins_so_long_after_the_last(spacing, sessions, awaiting, apart_ns):
    assert spacing.is_early(sessions, awaiting, NOW + apart_ns - 1)
    assert not spacing.is_early(sessions, awaiting, NOW + apart_ns)
    spacing.begin(NOW + apart_ns)
    assert spacing.is_early(sessions, awaiting, NOW + apart_ns)


def test_nobody_whose_first_codes_a_step_brings_waits_for_it(spacing):
    assert not spacing.is_early(MANY, [WITHOUT_ROW, WITH_ROW], NOW + 1)


def test_steps_of_few_keep_close(spacing):
    assert not spacing.is_early(MANY_SESSIONS, [], NOW + 1)


def test_steps_keep_close_on_a_device_that_token2wav_has_not(spacing, ledger):
    ledger.shared = False
    assert not spacing.is_early(MANY, [], NOW + 1)
