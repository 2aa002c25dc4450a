# SPDX-License-Identifier: Apache-2.0
"""What the thinker keeps of one session."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from triton_omni.errors import OmniError, StageName
from triton_omni.ledger import SessionLedger
from triton_omni.outbox import Outbox, Parcel
from triton_omni.request import RawRequest
from triton_omni.stage import Outlet
from triton_omni.tally import Ending
from triton_omni.thinker.callers import Caller
from triton_omni.tracing import NO_SPAN, Span
from triton_omni.wire import Kind, Session, SessionKey, ThinkerMessage, ThinkerReport

STILL_S = 1.0
"""A later stage whose loop has not turned for so long is in a long step, or hangs."""


@dataclass
class OpenSession:
    """State of one session; changed by the loop's thread only, but for the deadline, which the request brings, and what
    Triton refused, which the sending thread counts.
    """

    key: SessionKey
    outlet: Outlet
    label: str
    accepted_ns: int
    deadline_ns: int
    outbox: Outbox
    raw: RawRequest | None = None
    """The request, while it waits for a thread that makes it ready."""
    session: Session | None = None
    """What the later stages were told; None before `OPEN`."""
    refusal: OmniError | None = None
    """Why it ended before `OPEN`; the client's answer waits until the talker has given back every heartbeat."""
    sequence: int = 0
    sent: int = 0
    refused: int = 0
    """Of so many messages, those that did not leave."""
    left_ns: int = 0
    reply_tokens: int = 0
    first_token_ns: int = 0
    report: ThinkerReport | None = None
    ending: Ending | None = None
    """By which error this stage ended it."""
    ended_ns: int = 0
    first_wanted: int = 0
    """Codes that token2wav wants for its first window; 0 = it has not said."""
    has_first_codes: bool = False
    """Whether it has them."""
    has_rested: bool = False
    """Whether the thinker has rested for its first window for as long as it may."""
    span: Span = NO_SPAN
    caller: Caller = field(default_factory=Caller)

    @property
    def state(self) -> str:
        """What it waits for: its preparation, its text, the later stages' end, or their leave."""
        if self.ended_ns:
            return "closing"
        if self.session is None:
            return "preparing"
        return "writing" if self.report is None else "speaking"

    @property
    def delivered(self) -> int:
        """Messages that the talker has, or will."""
        return self.sent - self.refused

    def is_held_up(self, ledger: SessionLedger) -> bool:
        """Whether a later stage that has the session stands still. An error would not come through it; and should it be
        ended, nobody but the thinker, with its request still open, could tell the client.
        """
        later: tuple[StageName, ...] = ("talker", "token2wav") if self.session is not None else ()
        return any(ledger.silent_for(stage) > STILL_S for stage in later)

    def finish_reply(self, reason: str, stop_string: str | None) -> None:
        """All of the reply is written; why, and by which stop string, if any."""
        self.outbox.finish_tensors()
        self.outbox.finish_text()
        self.report = ThinkerReport(
            finish_reason=reason,
            stop_string=stop_string,
            prompt_tokens=self.session.prompt_tokens if self.session else 0,
            reply_tokens=self.reply_tokens,
            first_token_ns=self.first_token_ns - self.accepted_ns if self.first_token_ns else 0,
            finished_ns=time.monotonic_ns() - self.accepted_ns,
        )

    def to_message(self, parcel: Parcel) -> ThinkerMessage:
        """The session's next message, with what leaves."""
        return ThinkerMessage(
            key=self.key,
            kind=Kind.DATA if parcel.tensor is not None else Kind.TEXT,
            sequence=self.sequence,
            text=parcel.text,
            rows=parcel.tensor,
            last=parcel.last,
            report=self.report if parcel.last else None,
        )
