# SPDX-License-Identifier: Apache-2.0
"""Transcripts of spoken replies, kept for a while: a later message may name one by its id, as OpenAI's audio models
allow.

The model reads earlier replies as text, so their text is all that is kept.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable


class Transcripts:
    """Texts by the ids of their audio; bounded in number and in time, the oldest go first.

    An id has 128 random bits, so whoever names one was told it.

    Args:
        limit: texts kept at most.
        seconds: how long each is kept.
        clock: seconds since the epoch.
    """

    def __init__(self, limit: int, seconds: int, clock: Callable[[], float] = time.time) -> None:
        self._limit = limit
        self._seconds = seconds
        self._clock = clock
        self._texts: OrderedDict[str, tuple[int, str]] = OrderedDict()

    def new_id(self) -> tuple[str, int]:
        """An id for audio that is about to be spoken, and when its text will be forgotten, seconds since the epoch."""
        return f"audio_{secrets.token_hex(16)}", int(self._clock()) + self._seconds

    def keep(self, audio_id: str, expires_at: int, text: str) -> None:
        """Remember what was said under this id."""
        self._texts[audio_id] = (expires_at, text)
        self._forget_old()

    def find(self, audio_id: str) -> str | None:
        """Return the transcript of this id; None = never known, or expired."""
        self._forget_old()
        expires_at, text = self._texts.get(audio_id, (0, ""))
        return text if expires_at > self._clock() else None

    def _forget_old(self) -> None:
        """Make room. Replies are in the order of their ends, so an expired one may stay for a while after others."""
        now = self._clock()
        while self._texts and (len(self._texts) > self._limit or next(iter(self._texts.values()))[0] <= now):
            self._texts.popitem(last=False)
