# SPDX-License-Identifier: Apache-2.0
"""Minimum interval between decode steps of the thinker while few replies are decoded and many play.

A step takes as much GPU time for one reply as for eight. With 32 streams, about two replies decode at a time, and their
steps take half of the GPU time, although text is far ahead of sound. token2wav, which is not ahead, waits meanwhile.
Steps at an interval leave it the GPU, and more of the next replies share one step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from triton_omni.policy.device_claim import MANY_SESSIONS
from triton_omni.session.ledger import SessionLedger
from triton_omni.thinker.open_session import OpenSession

APART_NS: Final = 12_000_000
"""Nanoseconds between the starts of two steps; a row is 20 ms of sound, so text stays ahead."""
FEW_WRITTEN: Final = 4
"""Maximum number of replies being decoded; with more, an interval takes speech away from all of them."""
ENOUGH_ROWS: Final = 36
"""Rows beyond the first window's: the second and third window need that many before the sound of the first ends."""


class MinimumInterval:
    """Decides in every iteration of the thinker's loop if a step may start.

    Args:
        ledger: the thinker's.
    """

    def __init__(self, ledger: SessionLedger) -> None:
        self._ledger = ledger
        self._begun_ns = 0

    def is_early(self, sessions: Iterable[OpenSession], now_ns: int) -> bool:
        """Return True if the next step must wait; otherwise record that a step starts now."""
        if now_ns - self._begun_ns < APART_NS and self._may_wait(sessions):
            return True
        self._begun_ns = now_ns
        return False

    def _may_wait(self, sessions: Iterable[OpenSession]) -> bool:
        if not self._ledger.shares_device_with("token2wav"):
            return False
        asked = [one for one in sessions if one.session is not None and not one.ended_ns]
        written = [one for one in asked if one.report is None]
        return len(asked) > MANY_SESSIONS and len(written) <= FEW_WRITTEN and all(map(_has_enough, written))


def _has_enough(session: OpenSession) -> bool:
    """Return True if the reply's rows are ahead of its sound by what the next windows need."""
    request = session.session
    if request is None or not request.want_audio or not session.first_wanted:
        return False
    return session.reply_rows >= session.first_wanted + ENOUGH_ROWS
