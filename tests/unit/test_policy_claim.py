# SPDX-License-Identifier: Apache-2.0
"""Claims of a GPU that stages share: granted while a stream waits, never for more than half of the time."""

from __future__ import annotations

from triton_omni.policy.rules import Claim

MS = 1_000_000
LIMIT = 150 * MS


def test_nothing_is_claimed_while_no_stream_waits() -> None:
    claim = Claim(LIMIT)
    assert [claim.until_ns(False, now) for now in (1, 10 * MS)] == [0, 0]


def test_a_claim_lasts_as_long_as_a_stream_waits() -> None:
    claim = Claim(LIMIT)
    until = claim.until_ns(True, 5 * MS)
    assert until == 5 * MS + LIMIT
    assert claim.until_ns(True, 30 * MS) == until
    assert claim.until_ns(False, 31 * MS) == 0


def test_after_a_claim_the_others_have_as_long() -> None:
    claim = Claim(LIMIT)
    claim.until_ns(True, 10 * MS)
    claim.until_ns(False, 40 * MS)
    assert claim.until_ns(True, 50 * MS) == 0
    assert claim.until_ns(True, 69 * MS) == 0
    assert claim.until_ns(True, 70 * MS) == 70 * MS + LIMIT


def test_a_claim_ends_at_its_limit_and_is_granted_again_after_as_long() -> None:
    claim = Claim(LIMIT)
    until = claim.until_ns(True, MS)
    assert claim.until_ns(True, until - 1) == until
    assert claim.until_ns(True, until) == 0
    assert claim.until_ns(True, until + LIMIT - 1) == 0
    assert claim.until_ns(True, until + LIMIT) == until + 2 * LIMIT


def test_streams_that_wait_without_end_get_half_of_the_time() -> None:
    claim, claimed = Claim(LIMIT), 0
    for now in range(MS, 10_000 * MS, MS):
        claimed += claim.until_ns(True, now) > now
    assert 0.45 <= claimed / 10_000 <= 0.55


def test_a_limit_of_zero_grants_none() -> None:
    claim = Claim(0)
    assert not any(claim.until_ns(True, now) for now in range(MS, 500 * MS, MS))
