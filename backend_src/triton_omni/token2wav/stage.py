# SPDX-License-Identifier: Apache-2.0
"""The last stage: codec codes in, waveform chunks out. It alone answers the client of an open session.

Text is passed through at once. An error of any stage becomes the client's error here, after every other request of the
ensemble has ended. An error response while one is open or on its way would leak the client's request for ever. It is
independent of Triton.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping

import torch

from triton_omni.core.errors import InternalError, OmniError
from triton_omni.core.metrics import POWERS, SECONDS, Histogram, Metric
from triton_omni.core.policy_settings import NS_PER_MS, Token2WavPolicy
from triton_omni.core.tracing import NO_TRACER, Tracer
from triton_omni.link.receiver import LinkLatency, LinkReceiver, Until
from triton_omni.link.ring import Ring
from triton_omni.link.sessions import Arrival, LinkSessions
from triton_omni.policy.rules import Claim
from triton_omni.session.answer import Answer, to_base64, wav_header
from triton_omni.session.engine import AudioOutput, WaveformEngine
from triton_omni.session.engine_health import EngineHealth
from triton_omni.session.ledger import SessionLedger
from triton_omni.session.ledger_table import CANCELLED, CLAIMED, CLOSED, FAILED, REACHED, WANTED, WINDOWS
from triton_omni.session.loop import IDLE_POLL_S, StageLoop
from triton_omni.session.outcome import RequestOutcome
from triton_omni.session.stage import SOON_S, ResponseSender, StageStats, memory_metrics, refused_error
from triton_omni.session.wire import Kind, Session, SessionKey, TalkerMessage, Value
from triton_omni.token2wav.open_session import OpenSession, TextRelay, to_pcm16, whole_groups

UPSTREAM_STOP_S = 2.0
"""Seconds that an error waits for thinker and talker to send their finals."""
LONGEST_STEP_S = 30.0
"""The same in seconds while one of them is in an engine step: a session can end only between steps."""


class Token2WavStage:
    """Owns the waveform engine and every client's answer.

    Args:
        engine: stepped by this stage's loop alone.
        sample_rate: of the waveform, in hertz.
        policy: the limit of claims.
        tracer: of the stage's spans.
        ring: shared ring through which codes arrive; None = all codes arrive in messages.
    """

    def __init__(
        self,
        engine: WaveformEngine,
        ledger: SessionLedger,
        *,
        device: torch.device,
        sample_rate: int,
        policy: Token2WavPolicy,
        tracer: Tracer = NO_TRACER,
        ring: Ring | None = None,
    ) -> None:
        self._engine, self._ledger, self._device = engine, ledger, device
        self._sample_rate = sample_rate
        self._claim = Claim(policy.claim_ms * NS_PER_MS)
        self._loop = StageLoop("omni-token2wav", self, device)
        self._health = EngineHealth("token2wav", engine, ledger)
        self._receiver = LinkReceiver(ledger, engine, device, ring, self._loop.wake)
        self._sessions = LinkSessions[TalkerMessage, OpenSession](
            ledger,
            loop=self._loop,
            health=self._health,
            receiver=self._receiver,
            handler=self,
            parse=functools.partial(TalkerMessage.from_tensors, seal=ledger.seal("talker")),
            tracer=tracer,
        )
        # By the whole key: a message with only a session's name must not end its relay.
        self._relays: dict[SessionKey, TextRelay] = {}
        self._samples = 0
        self._batches = Histogram(POWERS)
        self._times = {
            name: Histogram(SECONDS)
            for name in (
                "omni_first_text_seconds",
                "omni_first_audio_seconds",
                "omni_chunk_gap_seconds",
                "omni_reply_seconds",
            )
        }

    @property
    def link_latency(self) -> Mapping[Until, LinkLatency]:
        """Latency of codes from the talker."""
        return self._receiver.latency

    # Called from any thread.

    def start(self) -> None:
        """Start serving."""
        self._loop.start()

    def submit(self, tensors: Mapping[str, Value], sender: ResponseSender) -> None:
        """Take one message; its response sender is finished when it was copied, or at the session's end if it is
        `OPEN`. Its text is sent at once.

        Raises:
            Unsealed, InternalError: see `LinkSessions.accept`; the response sender is still open.
        """
        if (arrival := self._sessions.accept(tensors, sender)) is None:
            return
        message = arrival.message
        if message.kind == Kind.OPEN:
            self._relays.setdefault(message.key, TextRelay(sender, self._when_lost(message.key)))
        elif message.kind != Kind.HEARTBEAT and (relay := self._relays.get(message.key)) is not None:
            relay.forward(message)
        self._receiver.watch_for_cancel(message.key, sender, arrival.arrived_ns)
        self._loop.post(functools.partial(self._receive, arrival))

    def close(self) -> None:
        """End every session with an error, then stop the engine."""
        if self._sessions.shut_down():
            for session in list(self._sessions.open.values()):
                self._answer_held_error(session)
            self._engine.close()
            self._receiver.close()

    def stats(self) -> StageStats:
        """Return the figures of the last poll."""
        return self._health.stage_stats(len(self._sessions.open), 0)

    def metrics(self) -> Iterator[Metric]:
        """Yield the metrics, see `stage.Stage`."""
        yield from self._loop.clock.metrics()
        yield from self._health.metrics()
        yield from self._sessions.metrics()
        yield from self._receiver.metrics()
        yield from self._batches.metrics("omni_batch_size")
        yield Metric("omni_audio_seconds_total", self._samples / self._sample_rate)
        for name, times in self._times.items():
            yield from times.metrics(name)
        yield from memory_metrics(self._device)

    # On the loop's thread.

    def has_work(self) -> bool:
        """Return True if the engine could advance now."""
        return self._health.has_work()

    def poll(self) -> float:
        """Check every session. Claim the device if a stream waits for sound, before the step that launches it. Tell the
        other stages whether windows are under way.
        """
        self._ledger.beat()
        self._health.refresh()
        self._sessions.fetch(self._tell_wanted)
        works = self._health.failure is None
        waiting = works and self._engine.wants_claim
        self._ledger.set_word(CLAIMED, self._claim.until_ns(waiting, time.monotonic_ns()), "token2wav")
        self._ledger.set_word(WINDOWS, int(works and self._engine.has_windows), "token2wav")
        self._loop.waits_for = self._health.waits_for()
        return self._sessions.look_after_all()

    def step(self) -> None:
        """Run one engine step; answer with its samples."""
        outputs = self._engine.step()
        if outputs:
            self._batches.observe(len(outputs))
        for output in outputs:
            session = self._sessions.open.get(output.key)
            if session is not None and session.error is None:
                self._handle_output(session, output)

    def fail(self, error: Exception) -> None:
        """Handle an exception of the engine: end every session with an error, refuse later ones."""
        self._health.fail(error, self._sessions.fail_all)

    def _receive(self, arrival: Arrival[TalkerMessage]) -> None:
        self._sessions.receive(arrival)
        key = arrival.message.key
        if arrival.message.kind == Kind.OPEN and key.name not in self._sessions.open:
            self._relays.pop(key, None)

    # Sessions, see `SessionHandler`.

    def open_session(self, message: TalkerMessage, request: Session, sender: ResponseSender) -> OpenSession:
        """Open the session; from here on this stage answers the client."""
        self._ledger.write(message.key, REACHED)
        relay = self._relays.setdefault(message.key, TextRelay(sender, self._when_lost(message.key)))
        return OpenSession(message.key, sender, request, relay=relay, audio_done=not request.want_audio)

    def open_sequence(self, session: OpenSession, message: TalkerMessage) -> None:
        """Open the session's stream in the engine."""
        del message
        request = session.session
        if request.want_audio:
            self._engine.open(session.key.name, request.voice, request.seed, request.token2wav)
            self._tell_wanted(session)

    def take_message(self, session: OpenSession, message: TalkerMessage, sender: ResponseSender) -> None:
        """Feed codes to the engine, and hold an error back until the other stages have ended."""
        if message.failure is not None or session.error is not None:
            self._receiver.give_back(message.key, sender)
            if message.failure is not None:
                self._hold_error(session, message.failure.to_error())
            return
        self._receiver.feed_message(session, message, message.codes, sender)
        if message.codes is not None:
            self._tell_wanted(session)
        if message.codes_done:
            self._receiver.expect(session, message.placed)
        if message.last:
            session.ending = message
        self._finish_if_done(session)

    def _tell_wanted(self, session: OpenSession) -> None:
        """Tell the talker how many codes make the next window due."""
        if session.is_fed:
            self._ledger.write(session.key, WANTED, self._engine.wanted(session.key.name))

    def _handle_output(self, session: OpenSession, output: AudioOutput) -> None:
        if output.error is not None:
            self.fail_session(session, InternalError(output.error, stage="token2wav"))
            return
        if len(output.samples):
            lost = self._when_lost(session.key)
            # Sent first: a log record takes as long as the sending.
            session.sender.send(self._encode(session, output).to_tensors(), lost=lost)
            self._observe_chunk(session)
            session.samples += len(output.samples)
            self._samples += len(output.samples)
            session.chunks += 1
        elif output.final and (answer := self._encode(session, output)).audio_base64:
            session.sender.send(answer.to_tensors())
        session.clamped_codes = output.clamped_codes
        session.audio_done = output.final
        session.is_fed = session.is_fed and not output.final
        self._finish_if_done(session)

    def _observe_chunk(self, session: OpenSession) -> None:
        age_ns = session.age_ns
        if session.first_audio_ns:
            self._times["omni_chunk_gap_seconds"].observe((age_ns - session.last_audio_ns) / 1e9)
        else:
            session.first_audio_ns = age_ns
            self._times["omni_first_audio_seconds"].observe(age_ns / 1e9)
            self._sessions.log(session, "first_audio")
            session.span.event("first_audio")
        session.last_audio_ns = age_ns

    def _encode(self, session: OpenSession, output: AudioOutput) -> Answer:
        if session.session.audio_format == "f32":
            return Answer(audio=output.samples)
        header = wav_header(self._sample_rate) if session.session.audio_format == "wav" and not session.chunks else b""
        data = session.encoded_rest + header + to_pcm16(output.samples)
        if not output.final:
            data, session.encoded_rest = whole_groups(data)
        return Answer(audio_base64=to_base64(data))

    def _finish_if_done(self, session: OpenSession) -> None:
        if not session.audio_done or session.ending is None:
            return
        info = Answer(info=json.dumps(session.info(session.ending, self._sample_rate)))
        self._times["omni_reply_seconds"].observe(session.age_ns / 1e9)
        self._drop(session)
        # Before the last response is sent: its client may send the next request as soon as it has it.
        self._ledger.say_outcome(session.key, RequestOutcome())
        lost = functools.partial(self._loop.post, functools.partial(self._take_back, session))
        session.sender.conclude(info.to_tensors(), functools.partial(self._end_whole, session), lost)

    def _end_whole(self, session: OpenSession) -> None:
        """Log and close a session after all of its reply was sent; on the sending thread."""
        self._log_end(session, RequestOutcome())
        self._receiver.mark_closed(session.key)

    def _when_lost(self, key: SessionKey) -> Callable[[], object]:
        """Return the callback for a response of the session that cannot be sent."""
        return functools.partial(self._loop.post, functools.partial(self._end_refused, key))

    def _end_refused(self, key: SessionKey) -> None:
        if (session := self._sessions.open.get(key.name)) is not None:
            self.fail_session(session, refused_error("token2wav"))

    def _take_back(self, session: OpenSession) -> None:
        """Fail a session that was dropped as complete before all of its reply could be sent."""
        error = refused_error("token2wav")
        self._sessions.open[session.key.name] = session
        # The first text was counted when the session was dropped.
        session.relay.first_ns = 0
        # Before the other stages see the failure and its cause.
        self._ledger.say_outcome(session.key, RequestOutcome.of(error, "token2wav"))
        self.fail_session(session, error)

    def look_after(self, session: OpenSession) -> float:
        """Check one session; return the seconds until the next check."""
        if session.error is not None:
            return self._try_answer_error(session)
        if not self._ledger.holds(session.key) or self._ledger.has(session.key, CANCELLED):
            self._drop(session)
            self._log_end(session, RequestOutcome("cancelled"))
            session.sender.finish(then=functools.partial(self._receiver.mark_closed, session.key))
        elif self._ledger.has(session.key, CLOSED, "thinker"):
            self._await_failure(session)
        return IDLE_POLL_S

    def _await_failure(self, session: OpenSession) -> None:
        """Wait for the error with which the thinker ended; it is on its way here or was lost."""
        session.orphaned_ns = session.orphaned_ns or time.monotonic_ns()
        if self._others_ended(session.key) or self._waited_enough(session, session.orphaned_ns):
            self.fail_session(session, InternalError("the stages before ended the session without an answer"))

    def fail_session(self, session: OpenSession, error: OmniError) -> None:
        """Hold this error until the other stages have ended the session, then answer it."""
        if session.error is not None:
            return
        error.stage = error.stage or "token2wav"
        self._ledger.write(session.key, FAILED)
        self._hold_error(session, error)

    def _hold_error(self, session: OpenSession, error: OmniError) -> None:
        if session.error is None:
            session.error, session.error_ns = error, time.monotonic_ns()
            session.is_fed = False
            session.relay.close()
            self._health.abort(session.key.name)

    def _try_answer_error(self, session: OpenSession) -> float:
        if self._others_ended(session.key) or self._waited_enough(session, session.error_ns):
            self._answer_held_error(session)
        return SOON_S

    def _waited_enough(self, session: OpenSession, since_ns: int) -> bool:
        now = time.monotonic_ns()
        if any(self._ledger.silent_for(stage) > UPSTREAM_STOP_S / 2 for stage in ("thinker", "talker")):
            session.upstream_busy_ns = now
        idle_since_ns = max(since_ns, session.upstream_busy_ns)
        return now - idle_since_ns > UPSTREAM_STOP_S * 1e9 or now - since_ns > LONGEST_STEP_S * 1e9

    def _others_ended(self, key: SessionKey) -> bool:
        """Return True if no stage holds a request of this session except its `OPEN` here."""
        to_talker = self._ledger.in_transit(key, "thinker", "talker")
        to_here = self._ledger.in_transit(key, "talker", "token2wav")
        return to_talker == 0 and to_here == 1

    def _answer_held_error(self, session: OpenSession) -> None:
        unexplained = InternalError("the session ended without an answer", stage="token2wav")
        self.answer_error(session, session.error or unexplained)

    def answer_error(self, session: OpenSession, error: OmniError) -> None:
        """End the session's `OPEN` request with this error at once, and drop the session."""
        self._drop(session)
        ending = RequestOutcome.of(error, "token2wav")
        self._ledger.say_outcome(session.key, ending)
        self._log_end(session, ending)
        session.sender.fail(error, functools.partial(self._receiver.mark_closed, session.key))

    def _log_end(self, session: OpenSession, ending: RequestOutcome) -> None:
        made_s = session.samples / self._sample_rate
        self._sessions.log_end(session, ending.code, by=ending.by, audio_s=made_s, chunks=session.chunks)

    def _drop(self, session: OpenSession) -> None:
        held = self._sessions.open.pop(session.key.name, None)
        self._relays.pop(session.key, None)
        session.relay.close()
        if held is not None and session.relay.first_ns:
            waited_ns = session.relay.first_ns - session.session.accepted_ns
            self._times["omni_first_text_seconds"].observe(waited_ns / 1e9)
        self._health.abort(session.key.name)
