# SPDX-License-Identifier: Apache-2.0
"""What the thinker keeps of one session."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from triton_omni.core.errors import OmniError, StageName
from triton_omni.core.tracing import NO_SPAN, Span
from triton_omni.link.ring_writer import RingWriter
from triton_omni.link.send_queue import Batch, SendQueue
from triton_omni.request.parse import RawRequest
from triton_omni.session.engine import FinishReason, ThinkerOutput
from triton_omni.session.ledger import SessionLedger
from triton_omni.session.ledger_layout import STAGES
from triton_omni.session.outcome import RequestOutcome
from triton_omni.session.stage import ResponseSender
from triton_omni.session.wire import Failure, Kind, Session, SessionKey, ThinkerMessage, ThinkerReport
from triton_omni.thinker.direct_calls import Caller

STILL_S = 1.0
"""A later stage whose loop has not turned for so long is in a long step, or hangs."""

HELD_UP_AT_MOST_S = 60.0
"""So long after its deadline a session waits for a stage that stands still; the supervisor ends that after 30 s."""

FORGET_AFTER_S = 5.0
"""After this, a slot whose later stages stay silent is used again; its generation keeps late messages out."""


@dataclass
class OpenSession:
    """State of one session; changed by the loop's thread only, but for the deadline, which the request brings, and what
    Triton refused, which the sending thread counts.
    """

    key: SessionKey
    sender: ResponseSender
    label: str
    accepted_ns: int
    deadline_ns: int
    send_queue: SendQueue
    raw: RawRequest | None = None
    """The request, while it waits for a thread that makes it ready."""
    session: Session | None = None
    """What the later stages were told; None before `OPEN`."""
    refusal: OmniError | None = None
    """Once it has ended, what its client is told unless token2wav has it and does so; None = that is settled."""
    sequence: int = 0
    sent: int = 0
    refused: int = 0
    """Of so many messages, those that did not leave."""
    left_ns: int = field(init=False)
    """When the last message did; before the first, when the request was accepted."""
    reply_tokens: int = 0
    first_token_ns: int = 0
    report: ThinkerReport | None = None
    ending: RequestOutcome | None = None
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

    def __post_init__(self) -> None:
        self.left_ns = self.accepted_ns

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

    @property
    def wanted_rows(self) -> int | None:
        """Rows without which the talker can do nothing: it begins with the reply's first. None = it can use each."""
        prompt = self.session.prompt_tokens if self.session is not None else 0
        return prompt + 1 if self.send_queue.given <= prompt else None

    @property
    def reply_rows(self) -> int:
        """Rows of the reply that were made, each of which the talker draws a code from; below 0 where the prompt lacks
        some.
        """
        prompt = self.session.prompt_tokens if self.session is not None else 0
        return self.send_queue.given + self.send_queue.held - prompt

    def is_alone(self, ledger: SessionLedger) -> bool:
        """Whether no message of it is open in a later stage or on its way there."""
        returned = ledger.returned(self.key, "talker") == self.delivered
        # None where the talker never had the session.
        return returned and not ledger.in_transit(self.key, "talker", "token2wav")

    def mark_closed(self, ledger: SessionLedger) -> None:
        """On the sending thread, behind the final: by then it is known how many messages were refused."""
        ledger.mark_closed(self.key, self.delivered)

    def silent_stages(self, ledger: SessionLedger) -> list[StageName]:
        """Which of those that have it have not closed it."""
        stages: tuple[StageName, ...] = ("thinker",)
        # Behind a stage that died, others may never have heard of the session.
        if self.session is not None and not ledger.lost_stages(self.key):
            stages = STAGES
        return [stage for stage in stages if not ledger.closed(self.key, stage)]

    def is_late(self, now_ns: int) -> bool:
        """Whether it ended so long ago that nobody waits for the other stages any more."""
        return now_ns - self.ended_ns >= FORGET_AFTER_S * 1e9

    def is_overdue(self, ledger: SessionLedger, now_ns: int) -> bool:
        """Whether its deadline has passed, and no later stage that has it stands still. Through such a stage an error
        would not come; and should that be ended, nobody but the thinker, with its request still open, could tell the
        client. Where nobody ends it the session does not wait for it for ever.
        """
        if now_ns < self.deadline_ns:
            return False
        later: tuple[StageName, ...] = ("talker", "token2wav") if self.session is not None else ()
        still = any(ledger.silent_for(stage) > STILL_S for stage in later)
        return not still or now_ns - self.deadline_ns > HELD_UP_AT_MOST_S * 1e9

    def place(self, ring_writer: RingWriter) -> None:
        """Have rows leave by the talker's ring: the reply's, but for the first, with which the talker begins."""
        send_queue = self.send_queue
        if not send_queue.held:
            return
        if not send_queue.past_messages and self.wanted_rows is None and ring_writer.has_places(self.key):
            send_queue.go_past_messages()
        if ring_writer.take(self.key, send_queue):
            ring_writer.tell(self.key, send_queue)

    def put(self, output: ThinkerOutput) -> None:
        """Have what a step of the engine gave wait to leave."""
        self.reply_tokens += len(output.token_ids)
        if output.token_ids and not self.first_token_ns:
            self.first_token_ns = time.monotonic_ns()
        self.send_queue.put_text(output.text)
        if output.rows is not None:
            self.send_queue.put(output.rows, output.rows_ready)
        if output.finish_reason is not None:
            self._finish_reply(output.finish_reason, output.stop_string)

    def _finish_reply(self, reason: FinishReason, stop_string: str | None) -> None:
        self.send_queue.finish_tensors()
        self.send_queue.finish_text()
        self.report = ThinkerReport(
            finish_reason=reason,
            stop_string=stop_string,
            prompt_tokens=self.session.prompt_tokens if self.session else 0,
            reply_tokens=self.reply_tokens,
            first_token_ns=self.first_token_ns - self.accepted_ns if self.first_token_ns else 0,
            finished_ns=time.monotonic_ns() - self.accepted_ns,
        )

    def stop(self) -> None:
        """It ends now, with what still waits to leave."""
        self.ended_ns, self.raw = time.monotonic_ns(), None
        self.send_queue = SendQueue(self.send_queue.largest)

    def to_failure(self, error: OmniError) -> ThinkerMessage:
        """The session's last message, with the error that ends it."""
        failure = Failure.of(error, "thinker")
        return ThinkerMessage(key=self.key, kind=Kind.ERROR, sequence=self.sequence, failure=failure)

    def to_message(self, batch: Batch) -> ThinkerMessage:
        """The session's next message, with what leaves."""
        return ThinkerMessage(
            key=self.key,
            kind=Kind.DATA if batch.tensor is not None else Kind.TEXT,
            sequence=self.sequence,
            text=batch.text,
            rows=batch.tensor,
            placed=self.send_queue.placed,
            last=batch.last,
            report=self.report if batch.last else None,
        )
