# SPDX-License-Identifier: Apache-2.0
"""When the talker's steps keep apart: many are served, and of those who await first codes none has its next row yet.

A step takes the device nearly as long for one reply as for thirty. Steps that keep apart leave it to the other stages,
and more replies share each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from triton_omni.policy.device_claim import MANY_SESSIONS
from triton_omni.session.ledger import SessionLedger

LONGEST_APART_NS: Final = 5_000_000
"""From one step's beginning to the next one's where very many are served: four times as fast as codes sound."""
APART_NS: Final = 1_000_000
"""The same for each session beyond `MANY_SESSIONS`, so that one more costs the others little."""
AWAITED: Final = 2
"""So many times as long while first codes are awaited, of replies whose next row is yet to come."""


class MinimumInterval:
    """Asked at every turn of the talker's loop, where a step may begin.

    Args:
        ledger: the talker's.
    """

    def __init__(self, ledger: SessionLedger) -> None:
        self._ledger = ledger
        self._begun_ns = 0

    def begin(self, now_ns: int) -> None:
        """A step begins."""
        self._begun_ns = now_ns

    def is_early(self, sessions: int, *, is_awaited: bool, has_row: Callable[[], bool], now_ns: int) -> bool:
        """Whether the next step is to wait.

        Args:
            sessions: how many there are with a voice, whether they still speak or are being heard to the end.
            is_awaited: whether first codes of any are.
            has_row: whether a step could bring such a one's next code, behind those under way; asked where it counts.
            now_ns: by the monotonic clock.
        """
        if sessions <= MANY_SESSIONS or not self._ledger.shares_device_with("token2wav"):
            return False
        apart_ns = min((sessions - MANY_SESSIONS) * APART_NS, LONGEST_APART_NS) * (AWAITED if is_awaited else 1)
        return now_ns - self._begun_ns < apart_ns and not has_row()
