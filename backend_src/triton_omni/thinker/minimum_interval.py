# SPDX-License-Identifier: Apache-2.0
"""When the thinker's steps keep apart: few replies are written beside many that are heard, and all have text enough.

A step takes the device as long for one reply as for eight. While 32 listen, two replies at a time are written, and
their steps are half of what the device does, though their text is far ahead of their sound: token2wav, which is not,
waits beside them. Steps that keep apart leave it the device, and more of the next replies share one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from triton_omni.policy.device_claim import MANY_SESSIONS
from triton_omni.session.ledger import SessionLedger
from triton_omni.thinker.open_session import OpenSession

APART_NS: Final = 12_000_000
"""From one step's beginning to the next one's: a row is 20 ms of sound, so text stays ahead."""
FEW_WRITTEN: Final = 4
"""Where more replies are written at once, steps that keep apart take speech away from all of them."""
ENOUGH_ROWS: Final = 36
"""Beyond those of the first window: the second and third are made of so many, before the sound of the first ends."""


class MinimumInterval:
    """Asked at every turn of the thinker's loop, where a step may begin.

    Args:
        ledger: the thinker's.
    """

    def __init__(self, ledger: SessionLedger) -> None:
        self._ledger = ledger
        self._begun_ns = 0

    def is_early(self, sessions: Iterable[OpenSession], now_ns: int) -> bool:
        """Whether the next step is to wait; where not, one is taken to begin now."""
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
    """Whether a reply's text is ahead of its sound by what its next windows are made of."""
    request = session.session
    if request is None or not request.want_audio or not session.first_wanted:
        return False
    return session.reply_rows >= session.first_wanted + ENOUGH_ROWS
