# SPDX-License-Identifier: Apache-2.0
"""Claims on a device that stages share: granted while somebody waits, never for more than half of the time."""

from __future__ import annotations

from triton_omni.policy.device_claim import LONGEST_CLAIM_NS, DeviceClaim

MS = 1_000_000


def test_nothing_is_claimed_while_nobody_waits():
    claim = DeviceClaim()
    assert [claim.until_ns(False, now) for now in (1, 10 * MS)] == [0, 0]


def test_a_claim_lasts_as_long_as_somebody_waits():
    claim = DeviceClaim()
    until = claim.until_ns(True, 5 * MS)
    assert until == 5 * MS + LONGEST_CLAIM_NS
    assert claim.until_ns(True, 30 * MS) == until
    assert claim.until_ns(False, 31 * MS) == 0


def test_behind_a_claim_the_others_have_as_long():
    claim = DeviceClaim()
    claim.until_ns(True, 10 * MS)
    claim.until_ns(False, 40 * MS)
    assert claim.until_ns(True, 50 * MS) == 0
    assert claim.until_ns(True, 69 * MS) == 0
    assert claim.until_ns(True, 70 * MS) == 70 * MS + LONGEST_CLAIM_NS


def test_a_claim_ends_at_its_limit_and_is_granted_again_after_as_long():
    claim = DeviceClaim()
    until = claim.until_ns(True, MS)
    assert claim.until_ns(True, until - 1) == until
    assert claim.until_ns(True, until) == 0
    assert claim.until_ns(True, until + LONGEST_CLAIM_NS - 1) == 0
    assert claim.until_ns(True, until + LONGEST_CLAIM_NS) == until + 2 * LONGEST_CLAIM_NS


def test_whoever_waits_without_end_gets_half_of_the_time():
    claim, claimed = DeviceClaim(), 0
    for now in range(MS, 10_000 * MS, MS):
        claimed += claim.until_ns(True, now) > now
    assert 0.45 <= claimed / 10_000 <= 0.55
