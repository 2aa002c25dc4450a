# SPDX-License-Identifier: Apache-2.0
"""Minimum interval between decode steps of the talker, while many streams play and no stream can get its first codes.

A step takes nearly as much GPU time for one reply as for thirty. Steps at an interval leave the GPU to the other
stages, and more replies share one step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from triton_omni.policy.device_claim import MANY_SESSIONS
from triton_omni.session.ledger import SessionLedger

LONGEST_APART_NS: Final = 5_000_000
"""Maximum nanoseconds between the starts of two steps: codes still come four times as fast as they play."""
APART_NS: Final = 1_000_000
"""Nanoseconds of interval for each session beyond `MANY_SESSIONS`, so that one more costs the others little."""
AWAITED: Final = 2
"""Factor of the interval while first codes are awaited by replies whose next row is missing."""


class MinimumInterval:
    """Decides in every iteration of the talker's loop if a step may start.

    Args:
        ledger: the talker's.
    """

    def __init__(self, ledger: SessionLedger) -> None:
        self._ledger = ledger
        self._begun_ns = 0

    def begin(self, now_ns: int) -> None:
        """Record that a step starts."""
        self._begun_ns = now_ns

    def is_early(self, sessions: int, *, is_awaited: bool, has_row: Callable[[], bool], now_ns: int) -> bool:
        """Return True if the next step must wait.

        Args:
            sessions: number of sessions with audio, decoding or still playing.
            is_awaited: True if the first codes of any session are awaited.
            has_row: returns True if a step could give such a session its next code, after the steps in flight; called
                only if needed.
            now_ns: monotonic time, nanoseconds.
        """
        if sessions <= MANY_SESSIONS or not self._ledger.shares_device_with("token2wav"):
            return False
        apart_ns = min((sessions - MANY_SESSIONS) * APART_NS, LONGEST_APART_NS) * (AWAITED if is_awaited else 1)
        return now_ns - self._begun_ns < apart_ns and not has_row()
