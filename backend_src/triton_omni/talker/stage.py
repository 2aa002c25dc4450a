# SPDX-License-Identifier: Apache-2.0
"""The second stage: hidden rows in, codec codes out, the thinker's text passed through at once.

Credits of token2wav limit its codes, never its text. It is independent of Triton and vLLM.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping

import msgspec
import torch

from triton_omni.core.errors import ErrorCode, InternalError, OmniError, TooLarge
from triton_omni.core.metrics import POWERS, Histogram, Metric
from triton_omni.core.settings import TalkerSettings
from triton_omni.core.tracing import NO_TRACER, Tracer
from triton_omni.link.receiver import LinkLatency, LinkReceiver, Until
from triton_omni.link.ring import Ring
from triton_omni.link.send_queue import SendQueue, message_interval_ns
from triton_omni.link.sender import LinkSender
from triton_omni.link.sessions import Arrival, LinkSessions
from triton_omni.session.engine import Sampling, TalkerEngine, TalkerOutput, TalkerPrompt
from triton_omni.session.engine_health import EngineHealth
from triton_omni.session.ledger import SessionLedger
from triton_omni.session.ledger_table import CACHED, CANCELLED, CLOSED, FAILED, REACHED, WANTED
from triton_omni.session.loop import IDLE_POLL_S, StageLoop
from triton_omni.session.outcome import RequestOutcome
from triton_omni.session.stage import (
    CLAIMED_POLL_S,
    SOON_S,
    ResponseSender,
    StageStats,
    lost_error,
    memory_metrics,
    refused_error,
)
from triton_omni.session.wire import (
    Failure,
    Kind,
    Session,
    SessionKey,
    TalkerMessage,
    ThinkerMessage,
    Value,
)
from triton_omni.talker.open_session import OpenSession

ORPHANED_S = 10.0
"""Seconds that a session ended by the thinker waits for its error, which comes within milliseconds, or seconds on an
overloaded machine.
"""


class TalkerStage:
    """Owns the talker's engine.

    Args:
        engine: stepped by this stage's loop alone.
        text_bos_id: returns the text id that begins a voice's speech, by voice name. It raises `BadRequest` if unknown.
        tracer: of the stage's spans.
        ring: shared ring through which the reply's rows arrive; None = all rows arrive in messages.
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
        self._settings, self._engine, self._ledger, self._device = settings, engine, ledger, device
        self._text_bos_id = text_bos_id
        self._loop = StageLoop("omni-talker", self, device)
        self._health = EngineHealth("talker", engine, ledger)
        self._receiver = LinkReceiver(ledger, engine, device, ring, self._loop.wake)
        self._sessions = LinkSessions[ThinkerMessage, OpenSession](
            ledger,
            loop=self._loop,
            health=self._health,
            receiver=self._receiver,
            handler=self,
            parse=functools.partial(ThinkerMessage.from_tensors, seal=ledger.seal("thinker")),
            tracer=tracer,
        )
        own_seal = ledger.seal("talker")
        self._sender = LinkSender[OpenSession, TalkerMessage](
            ledger,
            "token2wav",
            device,
            wanted=self._wanted,
            to_message=OpenSession.to_message,
            to_tensors=lambda message: message.to_tensors(own_seal),
            when_refused=self._when_refused,
        )
        self._interval_ns = 0
        self._batches = Histogram(POWERS)
        self._codes = self._cached_tokens = 0
        # The last heartbeat's request of each session that is not open yet. By the whole key: a message with only a
        # session's name must not end it.
        self._unopened: dict[SessionKey, ResponseSender] = {}

    @property
    def link_latency(self) -> Mapping[Until, LinkLatency]:
        """Latency of rows from the thinker."""
        return self._receiver.latency

    # Called from any thread.

    def start(self) -> None:
        """Start serving."""
        self._loop.start()

    def submit(self, tensors: Mapping[str, Value], sender: ResponseSender) -> None:
        """Take one message; its response sender is finished when it was copied, or at the session's end if it is
        `OPEN`.

        Raises:
            Unsealed, InternalError: see `LinkSessions.accept`; the response sender is still open.
        """
        if (arrival := self._sessions.accept(tensors, sender)) is None:
            return
        key = arrival.message.key
        # The session has reached the talker, so its caller is the ensemble (`thinker/direct_calls.py`).
        self._ledger.write(key, REACHED)
        self._receiver.watch_for_cancel(key, sender, arrival.arrived_ns)
        self._loop.post(functools.partial(self._receive, arrival))

    def close(self) -> None:
        """End every session with an error, then stop the engine."""
        if self._sessions.shut_down():
            self._sender.ring.close()
            for key, sender in self._unopened.items():
                self._receiver.give_back(key, sender)
            self._engine.close()
            self._receiver.close()

    def stats(self) -> StageStats:
        """Return the figures of the last poll."""
        sessions = list(self._sessions.open.values())
        return self._health.stage_stats(len(sessions), sum(session.send_queue.held for session in sessions))

    def metrics(self) -> Iterator[Metric]:
        """Yield the metrics, see `stage.Stage`."""
        yield from self._loop.clock.metrics()
        yield from self._health.metrics()
        yield from self._sessions.metrics()
        yield from self._receiver.metrics()
        yield from self._sender.metrics(list(self._sessions.open.values()))
        yield from self._batches.metrics("omni_batch_size")
        yield Metric("omni_codes_total", self._codes)
        yield Metric("omni_cached_tokens_total", self._cached_tokens)
        yield from memory_metrics(self._device)

    # On the loop's thread.

    def has_work(self) -> bool:
        """Return True if the engine could advance now."""
        return self._health.has_work()

    def poll(self) -> float:
        """Check every session. The interval between messages grows with the number of sessions with text to come."""
        self._ledger.beat()
        self._health.refresh()
        sessions = self._sessions.open
        self._interval_ns = message_interval_ns(sum(session.thinker is None for session in sessions.values()))
        self._sender.ring.find_ring(time.monotonic_ns())
        self._sessions.fetch(lambda session: None)
        delay = self._sessions.look_after_all()
        # token2wav may need fewer codes than before, or have freed places. After the look: nothing leaves for a session
        # that has just ended.
        self._sender.send(sessions.values(), self._interval_ns)
        paused = self._ledger.device_claimed()
        self._engine.pause(paused)
        self._engine.confine(self._ledger.device_has_windows())
        self._loop.waits_for = self._health.waits_for("claim" if paused else None)
        if paused:
            delay = min(delay, CLAIMED_POLL_S)
        for key, sender in list(self._unopened.items()):
            self._attend_unopened(key, sender)
        return min(delay, SOON_S) if self._unopened else delay

    def step(self) -> None:
        """Run one engine step over every session whose next row has arrived."""
        outputs = self._engine.step()
        if outputs:
            self._batches.observe(len(outputs))
        pairs = [(session, output) for output in outputs if (session := self._sessions.open.get(output.key))]
        for session, output in pairs:
            self._handle_output(session, output)
        open_now = [session for session, _ in pairs if session.key.name in self._sessions.open]
        self._sender.send(open_now, self._interval_ns)

    def fail(self, error: Exception) -> None:
        """Handle an exception of the engine: end every session with an error, refuse later ones."""
        self._health.fail(error, self._sessions.fail_all)

    def _receive(self, arrival: Arrival[ThinkerMessage]) -> None:
        """Hold each session's last heartbeat until the session opens. If the thinker dies before, it is the only
        request by which the client can be answered.
        """
        key = arrival.message.key
        if (held := self._unopened.pop(key, None)) is not None:
            self._receiver.give_back(key, held)
        is_open = key.name in self._sessions.open
        if arrival.message.kind == Kind.HEARTBEAT and not is_open and self._ledger.holds(key):
            self._unopened[key] = arrival.sender
        else:
            self._sessions.receive(arrival)

    def _attend_unopened(self, key: SessionKey, sender: ResponseSender) -> None:
        lost = self._ledger.lost_stages(key)
        if not (lost or self._ledger.is_over(key) or self._ledger.has(key, CLOSED, "thinker")):
            return
        del self._unopened[key]
        if lost:
            sender.fail(lost_error(lost[0]), functools.partial(self._ledger.count_returned, key))
        else:
            self._receiver.give_back(key, sender)

    # Sessions, see `SessionHandler`.

    def open_session(self, message: ThinkerMessage, request: Session, sender: ResponseSender) -> OpenSession:
        """Open the session, and token2wav's first: from there on an error can reach the client."""
        session = OpenSession(message.key, sender, request, send_queue=SendQueue(self._settings.max_codes))
        heard = msgspec.structs.replace(request, want_audio=request.want_audio and not request.prefill_only)
        self._sender.send_message(session, TalkerMessage(key=message.key, kind=Kind.OPEN, session=heard))
        return session

    def open_sequence(self, session: OpenSession, message: ThinkerMessage) -> None:
        """Reserve the session's rows in the engine, and tell the thinker with which one to begin.

        Raises:
            BadRequest: the voice is unknown.
            TooLarge: the prompt leaves no room for codes.
            Overloaded: there is no room for the rows.
            InternalError: the thinker sent no positions.
        """
        request = session.session
        if request.want_audio:
            prompt, sampling = self._prompt(request, message), self._within_limits(request)
            session.cached_tokens = self._engine.open(session.key.name, prompt, sampling, priority=request.priority)
            self._cached_tokens += session.cached_tokens
            self._ledger.write(session.key, CACHED, session.cached_tokens)
        else:
            session.send_queue.finish_tensors()

    def _prompt(self, request: Session, message: ThinkerMessage) -> TalkerPrompt:
        if message.positions is None:
            raise InternalError("OPEN without positions")
        bos_id = self._text_bos_id(request.voice)
        return TalkerPrompt(request.prompt_tokens, message.positions, bos_id, request.max_rows, message.prefixes)

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

    def take_message(self, session: OpenSession, message: ThinkerMessage, sender: ResponseSender) -> None:
        """Feed rows to the engine, and relay text and errors."""
        if message.failure is not None:
            self._receiver.give_back(message.key, sender)
            self._relay_failure(session, message.failure)
            return
        self._receiver.feed_message(session, message, message.rows, sender)
        session.send_queue.put_text(message.text, message.calls)
        if message.rows_done:
            self._receiver.expect(session, message.placed)
        if message.last:
            session.thinker = message.report
            session.send_queue.finish_text()
        self._sender.send([session], self._interval_ns)

    def _handle_output(self, session: OpenSession, output: TalkerOutput) -> None:
        if output.error is not None:
            self.fail_session(session, InternalError(output.error, stage="talker"))
            return
        is_prefill = session.session.prefill_only
        if output.codes is not None and not is_prefill and (count := output.codes.shape[0]):
            session.codes += count
            self._codes += count
            session.first_code_ns = session.first_code_ns or time.monotonic_ns()
            session.send_queue.put(output.codes, output.codes_ready)
        if output.finish_reason is not None:
            session.finish_codes("prefilled" if is_prefill else output.finish_reason)

    def _wanted(self, session: OpenSession) -> int:
        """Return the number of codes, from the first on, that token2wav needs for its next window; before it has
        published one, the maximum.
        """
        wanted = self._ledger.read(session.key, WANTED, "token2wav")
        return self._settings.max_codes if wanted is None else wanted

    def _when_refused(self, session: OpenSession, kind: Kind) -> None:
        """On the sending thread: end the session of a message that Triton refused."""
        del kind
        self._loop.post(functools.partial(self._end_refused, session))

    def _end_refused(self, session: OpenSession) -> None:
        if session.key.name in self._sessions.open:
            self.fail_session(session, refused_error("talker"))

    def look_after(self, session: OpenSession) -> float:
        """Check one session; return the seconds until the next check."""
        # Like the thinker, it stays until token2wav has answered: an error may still have to pass through here.
        if self._ledger.is_over(session.key):
            self._close(session)
            return IDLE_POLL_S
        if self._ledger.has(session.key, CLOSED, "thinker"):
            self._await_failure(session)
        return SOON_S if session.send_queue.waiting or session.thinker is not None else IDLE_POLL_S

    def _await_failure(self, session: OpenSession) -> None:
        """Wait for the error with which the thinker ended. It is on its way, or a client that called the stages
        directly kept it.
        """
        now = time.monotonic_ns()
        session.orphaned_ns = session.orphaned_ns or now
        only_open = self._ledger.in_transit(session.key, "thinker", "talker") == 1
        if only_open or now - session.orphaned_ns > ORPHANED_S * 1e9:
            self.fail_session(
                session, InternalError("the thinker ended the session without a last message", stage="talker")
            )

    def fail_session(self, session: OpenSession, error: OmniError) -> None:
        """End the session with an error of this stage, which token2wav answers."""
        self._relay_failure(session, Failure.of(error, "talker"))
        self._ledger.write(session.key, FAILED)

    def answer_error(self, session: OpenSession, error: OmniError) -> None:
        """End the session's `OPEN` request with this error at once, and drop the session."""
        if self._drop(session, error.code):
            self._ledger.say_outcome(session.key, RequestOutcome.of(error, "talker"))
            session.sender.fail(error, functools.partial(self._mark_ended, session))

    def _relay_failure(self, session: OpenSession, failure: Failure) -> None:
        self._sender.send_message(session, session.to_failure(failure))
        self._close(session, failure.code)

    def _close(self, session: OpenSession, code: ErrorCode | None = None) -> None:
        if self._drop(session, code):
            session.sender.finish(then=functools.partial(self._mark_ended, session))

    def _mark_ended(self, session: OpenSession) -> None:
        self._receiver.mark_closed(session.key, session.sent - session.refused)

    def _drop(self, session: OpenSession, code: ErrorCode | None) -> bool:
        """Remove the session, which ends with an error of this code, if any; return False if it was removed before."""
        if self._sessions.open.pop(session.key.name, None) is None:
            return False
        self._health.abort(session.key.name)
        code = code or self._code_of_end(session.key)
        self._sessions.log_end(session, code, codes=session.codes)
        return True

    def _code_of_end(self, key: SessionKey) -> ErrorCode | None:
        """Return the code of the error by which other stages ended the session; None = it was answered completely."""
        if (ending := self._ledger.outcome(key, "token2wav")) is not None:
            return ending.code
        return "cancelled" if self._ledger.has(key, CANCELLED) else "internal"
