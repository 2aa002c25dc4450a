# SPDX-License-Identifier: Apache-2.0
"""When the thinker pauses: every stream without sound waits only for the later stages.

Steps of the thinker slow down a window of token2wav and the talker's step before it. Those steps are not needed for a
while, since the reply is ahead of its sound from the first window on. token2wav claims the GPU
(`policy/device_claim.py`) once a window is due, but by then two steps of the thinker are in flight. So the thinker
pauses earlier.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from triton_omni.session.engine import ThinkerEngine
from triton_omni.session.ledger import SessionLedger
from triton_omni.thinker.open_session import OpenSession

LONGEST_REST_NS: Final = 150_000_000
"""Maximum pause in nanoseconds. A single stream's first codes take 10 ms. After many requests at once the talker lags
by twenty steps and some prefills, each 8 ms beside the thinker's steps and 1.5 ms alone.
"""
TEXT_REST_NS: Final = 20_000_000
"""The same in nanoseconds while any text-only request is decoded, which gets no text during a pause."""
_MANY: Final = 1 << 30
"""More rows than can be in flight: the number is not known yet."""


class PausePolicy:
    """Decides in every iteration of the thinker's loop if it pauses.

    Args:
        ledger: the thinker's, where token2wav publishes how many codes its next window needs.
        engine: each of its steps in flight gives every session one row.
    """

    def __init__(self, ledger: SessionLedger, engine: ThinkerEngine) -> None:
        self._ledger, self._engine = ledger, engine
        self._since_ns = 0

    def is_due(self, sessions: Iterable[OpenSession], now_ns: int) -> bool:
        """Return True if first windows are pending and none of them needs a row of a step that has not started."""
        if not self._ledger.shares_device_with("token2wav"):
            return False
        sessions = list(sessions)
        waiting = [(one, rows) for one in sessions if (rows := self._missing_rows(one)) is not None]
        if not waiting or max(rows for _, rows in waiting) > self._engine.steps_under_way:
            self._since_ns = 0
            return False
        self._since_ns = self._since_ns or now_ns
        rested_ns = now_ns - self._since_ns
        if rested_ns >= LONGEST_REST_NS:
            # A session that still waits, perhaps for a place in the talker's batch, causes no further pause together
            # with later ones.
            for one, _ in waiting:
                one.has_rested = True
        return rested_ns < (TEXT_REST_NS if any(map(_reads, sessions)) else LONGEST_REST_NS)

    def completes_first_window(self, session: OpenSession) -> bool:
        """Return True if the queued rows complete the session's first window. They skip the rate limit, which would
        send the sessions of many requests at once one after another.
        """
        request = session.session
        if request is None or not session.send_queue.held:
            return False
        missing = self._missing_rows(session)
        if missing is None or missing > 0:
            return False
        return session.send_queue.given - request.prompt_tokens < session.first_wanted

    def _missing_rows(self, session: OpenSession) -> int | None:
        """Return how many rows of the reply the session's first window lacks, negative if there are more; None = it
        waits for none.
        """
        request = session.session
        is_over = session.has_first_codes or session.ended_ns or session.report is not None
        if is_over or request is None or session.has_rested:
            return None
        if not request.want_audio:
            # A text-only request without text waits for a step too.
            return None if session.first_token_ns else _MANY
        wanted = self._ledger.wanted(session.key, "token2wav")
        if wanted is None:
            return _MANY
        session.first_wanted = session.first_wanted or wanted
        # token2wav wants more once it has the codes of the first window.
        session.has_first_codes = wanted > session.first_wanted
        if session.has_first_codes or wanted > request.max_rows:
            # Otherwise token2wav waits for the whole reply, in one window.
            return None
        return wanted - session.reply_rows


def _reads(session: OpenSession) -> bool:
    """Return True if a text-only reply is being decoded."""
    request = session.session
    return request is not None and not request.want_audio and session.report is None and not session.ended_ns
