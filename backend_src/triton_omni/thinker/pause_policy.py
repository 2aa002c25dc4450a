# SPDX-License-Identifier: Apache-2.0
"""When the thinker rests: every listener who hears nothing yet only waits for the stages behind it.

A window of token2wav and the talker's last step before it take longer beside the thinker's steps, which by then are of
use to nobody for a while: the reply is ahead of its sound from the first window on. token2wav claims the device
(`policy/device_claim.py`) once a window is due; by then two steps of the thinker are under way. So it stops by itself,
before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from triton_omni.session.engine import ThinkerEngine
from triton_omni.session.ledger import SessionLedger
from triton_omni.thinker.open_session import OpenSession

LONGEST_REST_NS: Final = 150_000_000
"""After so long it goes on in any case. One listener's first codes come within 10 ms; of a crowd that came at once the
talker lags twenty steps and some prompts behind, each of which takes 8 ms beside the thinker's steps and 1.5 alone."""
TEXT_REST_NS: Final = 20_000_000
"""The same where anybody reads text alone, who gets none meanwhile."""
_MANY: Final = 1 << 30
"""More rows than are under way: nobody knows yet how many."""


class PausePolicy:
    """Asked at every turn of the thinker's loop.

    Args:
        ledger: the thinker's, in which token2wav says how many codes its next window needs.
        engine: a step of which that is under way brings each session a row.
    """

    def __init__(self, ledger: SessionLedger, engine: ThinkerEngine) -> None:
        self._ledger, self._engine = ledger, engine
        self._since_ns = 0

    def is_due(self, sessions: Iterable[OpenSession], now_ns: int) -> bool:
        """Whether first windows are on their way, and none waits for a row of a step that is yet to begin."""
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
            # Who waits on, for a place in the talker's batch perhaps, gets no rest with others who come later.
            for one, _ in waiting:
                one.has_rested = True
        return rested_ns < (TEXT_REST_NS if any(map(_reads, sessions)) else LONGEST_REST_NS)

    def completes_first_window(self, session: OpenSession) -> bool:
        """Whether the last rows before a rest are held that a session's first window lacks: a crowd's would else leave
        one session behind another by the pace, for as long as the talker takes for all."""
        request = session.session
        if request is None or not session.send_queue.held:
            return False
        missing = self._missing_rows(session)
        if missing is None or missing > 0:
            return False
        return session.send_queue.given - request.prompt_tokens < session.first_wanted

    def _missing_rows(self, session: OpenSession) -> int | None:
        """How many rows of the reply the session's first window still lacks, below 0 if there are more; None = it waits
        for none, or no longer."""
        request = session.session
        is_over = session.has_first_codes or session.ended_ns or session.report is not None
        if is_over or request is None or session.has_rested:
            return None
        if not request.want_audio:
            # Whoever has no text yet waits for a step too.
            return None if session.first_token_ns else _MANY
        wanted = self._ledger.wanted(session.key, "token2wav")
        if wanted is None:
            return _MANY
        session.first_wanted = session.first_wanted or wanted
        # token2wav wants more once it has the codes of the first window.
        session.has_first_codes = wanted > session.first_wanted
        if session.has_first_codes or wanted > request.max_rows:
            # Or it waits for the whole reply, which is to be made in one piece.
            return None
        return wanted - session.reply_rows


def _reads(session: OpenSession) -> bool:
    """Whether text is being written for somebody who hears nothing."""
    request = session.session
    return request is not None and not request.want_audio and session.report is None and not session.ended_ns
