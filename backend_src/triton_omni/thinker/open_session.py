# SPDX-License-Identifier: Apache-2.0
"""State of one session in the thinker."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec

from triton_omni.core.errors import OmniError, StageName
from triton_omni.core.tracing import NO_SPAN, Span
from triton_omni.link.send_queue import Batch, SendQueue
from triton_omni.request.parse import RawRequest
from triton_omni.session.engine import FinishReason, ThinkerOutput
from triton_omni.session.ledger import SessionLedger
from triton_omni.session.ledger_table import CACHED, CLOSED, STAGES, WANTED
from triton_omni.session.outcome import RequestOutcome
from triton_omni.session.stage import ResponseSender
from triton_omni.session.wire import Failure, Kind, Session, SessionKey, ThinkerMessage, ThinkerReport
from triton_omni.thinker.direct_calls import Caller
from triton_omni.thinker.preprocessed import Preprocessed, extend_positions

STILL_S = 1.0
"""Seconds without an iteration of a later stage's loop, after which that stage is in a long step, or hangs."""

HELD_UP_AT_MOST_S = 60.0
"""Seconds that a session waits for a hanging stage after its deadline. The supervisor ends such a stage after 30 s."""

FORGET_AFTER_S = 5.0
"""Seconds after which a slot is reused although later stages have not closed the session; its generation keeps late
messages out.
"""

_MANY = 1 << 30
"""More rows than can be in flight: the number is not known yet."""


@dataclass
class OpenSession:
    """State of one session, changed by the loop's thread only. Exceptions: preprocessing sets the deadline, and the
    sending thread counts the messages that Triton refused.
    """

    key: SessionKey
    sender: ResponseSender
    label: str
    accepted_ns: int
    deadline_ns: int
    send_queue: SendQueue
    raw: RawRequest | None = None
    """The request while it waits for a preprocessing thread."""
    session: Session | None = None
    """The session as sent to the later stages; None before `OPEN`."""
    refusal: OmniError | None = None
    """After the session has ended: the error for its client unless token2wav has the session and answers it. None =
    that is settled.
    """
    sequence: int = 0
    sent: int = 0
    refused: int = 0
    """Number of messages that Triton refused, of those in `sent`."""
    left_ns: int = field(init=False)
    """Monotonic time of the last message, nanoseconds; before the first one, when the request was accepted."""
    reply_tokens: int = 0
    cached_tokens: int = 0
    first_token_ns: int = 0
    report: ThinkerReport | None = None
    ending: RequestOutcome | None = None
    """The error by which this stage ended the session."""
    ended_ns: int = 0
    first_wanted: int = 0
    """Codes that token2wav needs for its first window; 0 = not known yet."""
    has_first_codes: bool = False
    """True if token2wav has them."""
    first_ready_ns: int = 0
    """Monotonic time since which no row of the first window needs another step, nanoseconds; 0 = some row does."""
    span: Span = NO_SPAN
    caller: Caller = field(default_factory=Caller)

    def __post_init__(self) -> None:
        self.left_ns = self.accepted_ns

    @property
    def state(self) -> str:
        """State by what the session waits for: preprocessing, its text, the end of the later stages, or their close."""
        if self.ended_ns:
            return "closing"
        if self.session is None:
            return "preparing"
        return "writing" if self.report is None else "speaking"

    @property
    def is_prefill(self) -> bool:
        """True if the session has no reply: its prompt alone is computed."""
        return self.session is not None and self.session.prefill_only

    @property
    def delivered(self) -> int:
        """Number of messages that the talker has received or will receive."""
        return self.sent - self.refused

    @property
    def reply_rows(self) -> int:
        """Number of the reply's rows decoded so far, each of which gives one code; negative while the prompt lacks
        some.
        """
        prompt = self.session.prompt_tokens if self.session is not None else 0
        queue = self.send_queue
        return queue.skipped + queue.given + queue.held - prompt

    @property
    def is_read(self) -> bool:
        """True if a text-only reply is being decoded."""
        request = self.session
        is_text = request is not None and not request.want_audio and not request.prefill_only
        return is_text and self.report is None and not self.ended_ns

    def first_window_ready_ns(self, ledger: SessionLedger, steps_in_flight: int, now_ns: int) -> int | None:
        """Return the monotonic time in nanoseconds since which no row of the session's first window needs another step.
        0 = some row does; None = no first window is pending.
        """
        missing = self._missing_rows(ledger)
        if missing is None:
            return None
        if missing <= steps_in_flight:
            self.first_ready_ns = self.first_ready_ns or now_ns
        return self.first_ready_ns

    def _missing_rows(self, ledger: SessionLedger) -> int | None:
        """Return how many rows of the reply the first window lacks, negative if there are more; None = none is
        pending.
        """
        request = self.session
        if self.has_first_codes or self.ended_ns or self.report is not None or request is None or self.is_prefill:
            return None
        if not request.want_audio:
            # A text-only request without text waits for a step too.
            return None if self.first_token_ns else _MANY
        wanted = ledger.read(self.key, WANTED, "token2wav")
        if wanted is None:
            return _MANY
        self.first_wanted = self.first_wanted or wanted
        # token2wav wants more once it has the codes of the first window.
        self.has_first_codes = wanted > self.first_wanted
        if self.has_first_codes or wanted > request.max_rows:
            # Otherwise token2wav waits for the whole reply, in one window.
            return None
        return wanted - self.reply_rows

    def is_alone(self, ledger: SessionLedger) -> bool:
        """Return True if no message of the session is open in a later stage or on its way there."""
        returned = ledger.returned(self.key, "talker") == self.delivered
        # `in_transit` is None if the talker never had the session.
        return returned and not ledger.in_transit(self.key, "talker", "token2wav")

    def mark_closed(self, ledger: SessionLedger) -> None:
        """Mark the session closed; called on the sending thread after the final, when the number of refused messages is
        known.
        """
        ledger.write(self.key, CLOSED, self.delivered)

    def silent_stages(self, ledger: SessionLedger) -> list[StageName]:
        """Return the stages that have the session and have not closed it."""
        stages: tuple[StageName, ...] = ("thinker",)
        # After a stage died, the later ones may never have received the session.
        if self.session is not None and not ledger.lost_stages(self.key):
            stages = STAGES
        return [stage for stage in stages if not ledger.has(self.key, CLOSED, stage)]

    def is_late(self, now_ns: int) -> bool:
        """Return True if the session ended so long ago that nothing waits for the other stages any more."""
        return now_ns - self.ended_ns >= FORGET_AFTER_S * 1e9

    def is_overdue(self, ledger: SessionLedger, now_ns: int) -> bool:
        """Return True if its deadline has passed and no later stage that has it hangs. An error would not pass through
        a hanging stage. If the supervisor ends that stage, only the thinker, its request still open, can answer the
        client. The wait is limited, in case nothing ends that stage.
        """
        if now_ns < self.deadline_ns:
            return False
        later: tuple[StageName, ...] = ("talker", "token2wav") if self.session is not None else ()
        still = any(ledger.silent_for(stage) > STILL_S for stage in later)
        return not still or now_ns - self.deadline_ns > HELD_UP_AT_MOST_S * 1e9

    def open(self, preprocessed: Preprocessed) -> ThinkerMessage:
        """Return the session's first message but heartbeats. Rows of a prompt with names wait for `see_begin`."""
        self.session = msgspec.structs.replace(preprocessed.session, traceparent=self.span.traceparent)
        # The talker starts with the prompt's rows and the first row of the reply.
        self.send_queue.start = preprocessed.session.prompt_tokens + 1
        prefixes = preprocessed.placed.prefixes if preprocessed.session.want_audio else None
        self.send_queue.awaits_begin = prefixes is not None
        if not preprocessed.session.want_audio:
            self.send_queue.finish_tensors()
        positions = extend_positions(preprocessed.placed.positions, 2)
        return ThinkerMessage(
            key=self.key, kind=Kind.OPEN, session=self.session, positions=positions, prefixes=prefixes
        )

    def see_begin(self, ledger: SessionLedger) -> None:
        """Let rows leave from where the talker begins, once it has said where."""
        if self.send_queue.awaits_begin and (cached := ledger.read(self.key, CACHED, "talker")) is not None:
            self.send_queue.begin_at(cached)

    def queue_output(self, output: ThinkerOutput) -> None:
        """Queue the output of an engine step for sending."""
        self.reply_tokens += len(output.token_ids)
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        if output.token_ids and not self.first_token_ns:
            self.first_token_ns = time.monotonic_ns()
        if not self.is_prefill:
            self.send_queue.put_text(output.text, output.calls)
        if output.rows is not None:
            self.send_queue.put(output.rows, output.rows_ready)
        if output.rows_done:
            # The talker speaks the text before a call to its end while the call is written.
            self.send_queue.finish_tensors()
        if output.finish_reason is not None:
            self._finish_reply(output.finish_reason, output.stop_string)

    def _finish_reply(self, reason: FinishReason, stop_string: str | None) -> None:
        self.send_queue.finish_tensors()
        self.send_queue.finish_text()
        self.report = ThinkerReport(
            finish_reason="prefilled" if self.is_prefill else reason,
            stop_string=stop_string,
            prompt_tokens=self.session.prompt_tokens if self.session else 0,
            cached_tokens=self.cached_tokens,
            reply_tokens=0 if self.is_prefill else self.reply_tokens,
            first_token_ns=self.first_token_ns - self.accepted_ns if self.first_token_ns else 0,
            finished_ns=time.monotonic_ns() - self.accepted_ns,
        )

    def stop(self) -> None:
        """End the session now, and drop what is queued."""
        self.ended_ns, self.raw = time.monotonic_ns(), None
        self.send_queue = SendQueue(self.send_queue.largest)

    def to_failure(self, error: OmniError) -> ThinkerMessage:
        """Return the session's last message, with the error that ends it."""
        failure = Failure.of(error, "thinker")
        return ThinkerMessage(key=self.key, kind=Kind.ERROR, sequence=self.sequence, failure=failure)

    def to_message(self, batch: Batch) -> ThinkerMessage:
        """Return the session's next message, with the content of `batch`."""
        return ThinkerMessage(
            key=self.key,
            kind=Kind.DATA if batch.tensor is not None else Kind.TEXT,
            sequence=self.sequence,
            text=batch.text,
            calls=batch.calls,
            rows=batch.tensor,
            rows_done=batch.tensors_done,
            placed=self.send_queue.placed,
            last=batch.last,
            report=self.report if batch.last else None,
        )
