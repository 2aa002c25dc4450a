# SPDX-License-Identifier: Apache-2.0
"""The second stage: hidden rows in, codec codes out, the thinker's text passed through at once.

Credits of token2wav limit its codes, never its text. It is independent of Triton and vLLM.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import msgspec
import torch

from triton_omni.core.errors import ErrorCode, InternalError, OmniError, TooLarge
from triton_omni.core.metrics import Metric
from triton_omni.core.settings import TalkerSettings
from triton_omni.core.tracing import NO_TRACER, Tracer
from triton_omni.link.link_stage import LinkSession, LinkStage
from triton_omni.link.ring import Ring
from triton_omni.link.ring_writer import RingWriter
from triton_omni.link.send_queue import Batch, SendQueue, link_metrics, message_interval_ns
from triton_omni.session.engine import FinishReason, Sampling, TalkerEngine, TalkerOutput, TalkerPrompt
from triton_omni.session.ledger import SessionLedger
from triton_omni.session.ledger_table import CANCELLED, CLOSED, CONSUMED, FAILED, REACHED, WANTED
from triton_omni.session.loop import IDLE_POLL_S
from triton_omni.session.outcome import RequestOutcome
from triton_omni.session.stage import CLAIMED_POLL_S, SOON_S, ResponseSender, lost_error, refused_error
from triton_omni.session.wire import (
    Failure,
    Kind,
    Session,
    SessionKey,
    TalkerMessage,
    TalkerReport,
    ThinkerMessage,
    ThinkerReport,
    Value,
)

ORPHANED_S = 10.0
"""Seconds that a session ended by the thinker waits for its error, which comes within milliseconds, or seconds on an
overloaded machine.
"""


@dataclass
class _Open(LinkSession):
    """State of one session; touched by the loop's thread only."""

    send_queue: SendQueue = dataclasses.field(kw_only=True)
    sequence: int = 0
    refused: int = 0
    """Number of messages that Triton refused; counted by the sending thread."""
    codes: int = 0
    told: int = 0
    """Number of codes in token2wav's ring that token2wav was told of."""
    first_code_ns: int = 0
    thinker: ThinkerReport | None = None
    report: TalkerReport | None = None


class TalkerStage(LinkStage[ThinkerMessage, _Open]):
    """Owns the talker's engine.

    Args:
        engine: stepped by this stage's loop alone.
        text_bos_id: returns the text id that begins a voice's speech, by voice name. It raises `BadRequest` if unknown.
        ring: shared ring through which the reply's rows arrive.
    """

    def __init__(
        self,
        settings: TalkerSettings,
        engine: TalkerEngine,
        ledger: SessionLedger,
        *,
        device: torch.device,
        text_bos_id: Callable[[str], int],
        tracer: Tracer = NO_TRACER,
        ring: Ring | None = None,
    ) -> None:
        super().__init__("talker", engine, ledger, device=device, tracer=tracer, ring=ring)
        self._settings = settings
        self._engine = engine
        self._text_bos_id = text_bos_id
        self._own_seal = ledger.seal("talker")
        self._interval_ns = 0
        self._ring_writer = RingWriter(ledger, "token2wav", device)
        self._codes = 0
        # The last heartbeat's request of each session that is not open yet. By the whole key: a message with only a
        # session's name must not end it.
        self._unopened: dict[SessionKey, ResponseSender] = {}

    def poll(self) -> float:
        """Check every session. The interval between messages grows with the number of sessions with text to come."""
        self._interval_ns = message_interval_ns(sum(session.thinker is None for session in self._open.values()))
        self._ring_writer.find_ring(time.monotonic_ns())
        delay = super().poll()
        self._ring_writer.flush()
        held = self._ledger.device_claimed()
        self._engine.hold(held)
        if held:
            delay = min(delay, CLAIMED_POLL_S)
        for key, sender in list(self._unopened.items()):
            self._attend_unopened(key, sender)
        return min(delay, SOON_S) if self._unopened else delay

    def step(self) -> None:
        """Run one engine step over every session whose next row has arrived."""
        outputs = self._engine.step()
        if outputs:
            self._batches.observe(len(outputs))
        pairs = [(session, output) for output in outputs if (session := self._open.get(output.key)) is not None]
        for session, output in pairs:
            self._take(session, output)
        going_on = [session for session, _ in pairs if session.key.name in self._open]
        # Write codes to the rings before sending messages: one message takes longer than the codes of all sessions.
        for session in going_on:
            self._place(session)
        self._ring_writer.flush()
        for session in going_on:
            self._flush(session)

    def metrics(self) -> Iterator[Metric]:
        """Yield the metrics, see `stage.Stage`."""
        yield from super().metrics()
        open_now, count = list(self._open.values()), self._ledger.count
        yield from link_metrics((one.send_queue, count(one.key, CONSUMED, "token2wav")) for one in open_now)
        yield Metric("omni_codes_total", self._codes)

    def _parse(self, tensors: Mapping[str, Value]) -> ThinkerMessage:
        return ThinkerMessage.from_tensors(tensors, self._seal)

    def _relay(self, message: ThinkerMessage, sender: ResponseSender) -> None:
        """Mark in the ledger that the session has reached the talker: its caller is the ensemble
        (`thinker/direct_calls.py`).
        """
        del sender
        self._ledger.write(message.key, REACHED)

    def _held(self) -> int:
        return sum(session.send_queue.held for session in list(self._open.values()))

    def _receive(self, message: ThinkerMessage, sender: ResponseSender, arrived_ns: int) -> None:
        """Hold each session's last heartbeat until the session opens. If the thinker dies before, it is the only
        request by which the client can be answered.
        """
        key = message.key
        if (held := self._unopened.pop(key, None)) is not None:
            self._inbox.give_back(key, held)
        if message.kind == Kind.HEARTBEAT and key.name not in self._open and self._ledger.holds(key):
            self._unopened[key] = sender
        else:
            super()._receive(message, sender, arrived_ns)

    def _attend_unopened(self, key: SessionKey, sender: ResponseSender) -> None:
        lost = self._ledger.lost_stages(key)
        if not (lost or self._ledger.is_over(key) or self._ledger.has(key, CLOSED, "thinker")):
            return
        del self._unopened[key]
        if lost:
            sender.fail(lost_error(lost[0]), functools.partial(self._ledger.count_returned, key))
        else:
            self._inbox.give_back(key, sender)

    def _end_all(self) -> None:
        self._ring_writer.close()
        for key, sender in self._unopened.items():
            self._inbox.give_back(key, sender)

    def _begin(self, message: ThinkerMessage, request: Session, sender: ResponseSender) -> _Open:
        send_queue = SendQueue(self._settings.max_codes)
        session = _Open(message.key, sender, request, send_queue=send_queue)
        # Sent first: from here on token2wav holds the sender through which an error can reach the client.
        self._send(session, TalkerMessage(key=message.key, kind=Kind.OPEN, session=request))
        return session

    def _open_sequence(self, session: _Open, message: ThinkerMessage) -> None:
        request = session.session
        if request.want_audio:
            prompt, sampling = self._prompt(request, message), self._within_limits(request)
            self._engine.open(session.key.name, prompt, sampling, priority=request.priority)
        else:
            session.send_queue.finish_tensors()

    def _prompt(self, request: Session, message: ThinkerMessage) -> TalkerPrompt:
        if message.positions is None:
            raise InternalError("OPEN without positions")
        bos_id = self._text_bos_id(request.voice)
        return TalkerPrompt(request.prompt_tokens, message.positions, bos_id, request.max_rows)

    def _within_limits(self, request: Session) -> Sampling:
        room = self._settings.engine.max_model_len - request.prompt_tokens - 2
        limit = min(request.talker.max_tokens, self._settings.max_codes, room)
        if limit < 1:
            raise TooLarge(
                f"the prompt has {request.prompt_tokens} tokens, which leave the talker no room in its max_model_len "
                f"of {self._settings.engine.max_model_len}"
            )
        if request.talker.min_tokens > limit:
            raise TooLarge(
                f"sampling_parameters.talker.min_tokens: {request.talker.min_tokens} is over the {limit} codes that "
                f"the talker can give after a prompt of {request.prompt_tokens} tokens"
            )
        return dataclasses.replace(request.talker, max_tokens=limit)

    def _take_message(self, session: _Open, message: ThinkerMessage, sender: ResponseSender) -> None:
        if message.failure is not None:
            self._inbox.give_back(message.key, sender)
            self._relay_failure(session, message.failure)
            return
        self._take_rows(session, message, sender)
        session.send_queue.put_text(message.text)
        if message.last:
            self._finish_input(session, message)
        self._flush(session)

    def _take_rows(self, session: _Open, message: ThinkerMessage, sender: ResponseSender) -> None:
        if message.rows is None:
            self._inbox.give_back(message.key, sender)
            return
        self._feed(session, message.rows)
        self._inbox.give_back_consumed(session, message, message.rows, sender)

    def _take_placed(self, session: _Open, tensor: torch.Tensor) -> None:
        self._feed(session, tensor)

    def _feed(self, session: _Open, rows: torch.Tensor) -> None:
        if session.report is None and session.session.want_audio:
            self._engine.feed(session.key.name, rows)

    def _settle(self) -> None:
        self._engine.settle()

    def _finish_input(self, session: _Open, message: ThinkerMessage) -> None:
        session.thinker = message.report
        session.send_queue.finish_text()
        self._await_placed(session, message.placed)

    def _end_input(self, session: _Open) -> None:
        if session.report is None and session.session.want_audio:
            self._engine.end(session.key.name)

    def _take(self, session: _Open, output: TalkerOutput) -> None:
        if output.error is not None:
            self._fail(session, InternalError(output.error, stage="talker"))
            return
        if output.codes is not None and (count := output.codes.shape[0]):
            session.codes += count
            self._codes += count
            session.first_code_ns = session.first_code_ns or time.monotonic_ns()
            session.send_queue.put(output.codes, output.codes_ready)
        if output.finish_reason is not None:
            self._finish_codes(session, output.finish_reason)

    def _finish_codes(self, session: _Open, reason: FinishReason) -> None:
        session.send_queue.finish_tensors()
        accepted_ns = session.session.accepted_ns
        session.report = TalkerReport(
            finish_reason=reason,
            codes=session.codes,
            first_code_ns=session.first_code_ns - accepted_ns if session.first_code_ns else 0,
            finished_ns=time.monotonic_ns() - accepted_ns,
        )

    def _flush(self, session: _Open) -> None:
        send_queue = session.send_queue
        if send_queue.idle:
            return
        consumed, wanted = self._ledger.count(session.key, CONSUMED, "token2wav"), self._wanted(session.key)
        while batch := send_queue.pop_batch(consumed, interval_ns=self._interval_ns, wanted=wanted):
            self._send(session, _to_message(session, batch), batch.ready)

    def _wanted(self, key: SessionKey) -> int:
        """Return the number of codes, from the first on, that token2wav needs for its next window; before it has
        published one, the maximum.
        """
        wanted = self._ledger.read(key, WANTED, "token2wav")
        return self._settings.max_codes if wanted is None else wanted

    def _place(self, session: _Open) -> None:
        """Write codes to token2wav's ring as they come. Tell token2wav of them when they complete a window, when all
        are there, or when they fill half of the ring.
        """
        send_queue, key = session.send_queue, session.key
        if session.told == session.codes or send_queue.messages or not self._ring_writer.has_places(key):
            return
        send_queue.go_past_messages()
        if send_queue.held:
            self._ring_writer.queue_copy(key, send_queue)
        untold = send_queue.placed - session.told
        ends = session.report is not None and not send_queue.held
        complete = session.told < self._wanted(key) <= send_queue.placed
        if untold and (complete or ends or self._ring_writer.is_half_full(untold)):
            session.told = send_queue.placed
            self._ring_writer.queue_note(key, send_queue)

    def _send(self, session: _Open, message: TalkerMessage, ready: torch.cuda.Event | None = None) -> None:
        session.sequence += 1
        stamped = msgspec.structs.replace(message, number=session.sequence, sent_ns=time.monotonic_ns())
        session.sender.send(stamped.to_tensors(self._own_seal), ready, functools.partial(self._lose, session))

    def _lose(self, session: _Open) -> None:
        """On the sending thread: count a message that Triton refused, and end its session."""
        session.refused += 1
        self._loop.post(functools.partial(self._end_refused, session))

    def _end_refused(self, session: _Open) -> None:
        if session.key.name in self._open:
            self._fail(session, refused_error("talker"))

    def _look_after(self, session: _Open) -> float:
        # Like the thinker, it stays until token2wav has answered: an error may still have to pass through here.
        if self._ledger.is_over(session.key):
            self._close(session)
            return IDLE_POLL_S
        if self._ledger.has(session.key, CLOSED, "thinker"):
            self._await_failure(session)
        # token2wav may need fewer codes than before, or have freed places.
        self._place(session)
        self._flush(session)
        return SOON_S if session.send_queue.waiting or session.thinker is not None else IDLE_POLL_S

    def _await_failure(self, session: _Open) -> None:
        """Wait for the error with which the thinker ended. It is on its way, or a client that called the stages
        directly kept it.
        """
        now = time.monotonic_ns()
        session.orphaned_ns = session.orphaned_ns or now
        only_open = self._ledger.in_transit(session.key, "thinker", "talker") == 1
        if only_open or now - session.orphaned_ns > ORPHANED_S * 1e9:
            self._fail(session, InternalError("the thinker ended the session without a last message", stage="talker"))

    def _fail(self, session: _Open, error: OmniError) -> None:
        self._relay_failure(session, Failure.of(error, "talker"))
        self._ledger.write(session.key, FAILED)

    def _answer_error(self, session: _Open, error: OmniError) -> None:
        if self._drop(session, error.code):
            self._ledger.say_outcome(session.key, RequestOutcome.of(error, "talker"))
            session.sender.fail(error, functools.partial(self._mark_ended, session))

    def _relay_failure(self, session: _Open, failure: Failure) -> None:
        message = TalkerMessage(key=session.key, kind=Kind.ERROR, sequence=session.sequence, failure=failure)
        self._send(session, message)
        self._close(session, failure.code)

    def _close(self, session: _Open, code: ErrorCode | None = None) -> None:
        if self._drop(session, code):
            session.sender.finish(then=functools.partial(self._mark_ended, session))

    def _mark_ended(self, session: _Open) -> None:
        self._inbox.mark_closed(session.key, session.sequence - session.refused)

    def _drop(self, session: _Open, code: ErrorCode | None) -> bool:
        """Remove the session, which ends with an error of this code, if any; return False if it was removed before."""
        if self._open.pop(session.key.name, None) is None:
            return False
        self._health.abort(session.key.name)
        code = code or self._code_of_end(session.key)
        self._tell_end(session, code, codes=session.codes)
        return True

    def _code_of_end(self, key: SessionKey) -> ErrorCode | None:
        """Return the code of the error by which other stages ended the session; None = it was answered completely."""
        if (ending := self._ledger.outcome(key, "token2wav")) is not None:
            return ending.code
        return "cancelled" if self._ledger.has(key, CANCELLED) else "internal"


def _to_message(session: _Open, batch: Batch) -> TalkerMessage:
    return TalkerMessage(
        key=session.key,
        kind=Kind.DATA if batch.tensor is not None else Kind.TEXT,
        sequence=session.sequence,
        text=batch.text,
        codes=batch.tensor,
        codes_done=batch.tensors_done,
        placed=session.send_queue.placed,
        last=batch.last,
        thinker=session.thinker if batch.last else None,
        talker=session.report if batch.last else None,
    )
