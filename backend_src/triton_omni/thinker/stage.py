# SPDX-License-Identifier: Apache-2.0
"""The first stage: takes a client's request, opens its session, sends text and hidden rows to the talker.

It alone allocates and frees sessions. Its response sender stays open until token2wav has finished, so that a downstream
request is always open by which a client's cancel is noticed. It is independent of Triton and vLLM.
"""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from triton_omni.core.errors import BadRequest, DeadlineExceeded, InternalError, OmniError, Overloaded, StageName
from triton_omni.core.metrics import Doing, Metric
from triton_omni.core.policy_settings import NS_PER_MS
from triton_omni.core.settings import ThinkerSettings
from triton_omni.core.tracing import NO_TRACER, Tracer
from triton_omni.link.send_queue import SendQueue, message_interval_ns
from triton_omni.link.sender import LinkSender
from triton_omni.policy.rules import must_pause
from triton_omni.request.parse import RawRequest
from triton_omni.session.engine import ThinkerEngine, ThinkerOutput
from triton_omni.session.engine_health import EngineHealth
from triton_omni.session.ledger import SessionLedger
from triton_omni.session.ledger_table import CANCELLED, CLOSED, ENDING, FAILED, LEAVING, REACHED
from triton_omni.session.loop import IDLE_POLL_S, StageLoop
from triton_omni.session.outcome import RequestOutcome
from triton_omni.session.stage import (
    CLAIMED_POLL_S,
    RETRY_AFTER_RESTART_MS,
    SOON_S,
    ResponseSender,
    StageStats,
    as_omni_error,
    lost_error,
    memory_metrics,
    refused_error,
)
from triton_omni.session.wire import Kind, ThinkerMessage
from triton_omni.thinker import direct_calls
from triton_omni.thinker.open_session import OpenSession
from triton_omni.thinker.preprocess_pool import PreprocessPool
from triton_omni.thinker.preprocessed import Preprocessed, RequestPreprocessor
from triton_omni.thinker.request_metrics import RequestMetrics
from triton_omni.thinker.slots import Slots

RETRY_AFTER_MS = 250
UNLIMITED_TOKENS = 2
"""Number of first tokens that wait for no interval between messages. The talker starts with the first token's row,
which comes with the second token.
"""

logger = logging.getLogger(__name__)


class ThinkerStage:
    """Owns the thinker's engine and the life of every session.

    Args:
        engine: stepped by this stage's loop alone.
        preprocessor: checks, decodes and tokenises raw requests.
        device: of the engine.
        hidden_size: H of the rows; dtype: of the links, the same in the talker.
        tracer: of the stage's spans.
    """

    def __init__(
        self,
        settings: ThinkerSettings,
        engine: ThinkerEngine,
        preprocessor: RequestPreprocessor,
        ledger: SessionLedger,
        *,
        device: torch.device,
        hidden_size: int,
        dtype: torch.dtype,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._ledger = ledger
        self._slots = Slots(ledger, settings.max_sessions)
        self._device = device
        self._open: dict[str, OpenSession] = {}
        self._preprocess_pool = PreprocessPool(preprocessor, settings.preprocess_threads)
        self._loop = StageLoop("omni-thinker", self, device)
        self._health = EngineHealth("thinker", engine, ledger)
        seal = ledger.seal("thinker")
        self._sender = LinkSender[OpenSession, ThinkerMessage](
            ledger,
            "talker",
            device,
            wanted=lambda session: None,
            to_message=OpenSession.to_message,
            to_tensors=lambda message: message.to_tensors(hidden_size, dtype, seal),
            when_refused=self._when_refused,
        )
        self.request_metrics = RequestMetrics(ledger, tracer)

    # Called from any thread.

    def start(self) -> None:
        """Start serving."""
        self._loop.start()

    def submit(self, raw: RawRequest, sender: ResponseSender) -> None:
        """Accept a request; it is always answered through `sender`, with exactly one final."""
        accepted_ns = time.monotonic_ns()
        if not raw.request_id:
            # A name for logs and `info`.
            raw = replace(raw, request_id=secrets.token_hex(8))
        span = self.request_metrics.receive(raw, accepted_ns)
        if self._ledger.word(LEAVING):
            sender.fail(self.request_metrics.refuse(_leaving_error(), raw, span))
            return
        key = self._slots.allocate()
        if key is None:
            sender.fail(self.request_metrics.refuse(self._no_slot(), raw, span))
            return
        if lost := self._ledger.lost_stages(key):
            self._ledger.write(key, CLOSED)
            self._slots.release(key)
            sender.fail(self.request_metrics.refuse(_restart_refusal(lost[0]), raw, span))
            return
        sender.bind(key.slot)
        deadline_ns = accepted_ns + int(self._settings.timeout_s * 1e9)
        self._ledger.set_deadline(key, deadline_ns)
        send_queue = SendQueue(self._settings.rows_per_message)
        session = OpenSession(key, sender, raw.request_id, accepted_ns, deadline_ns, send_queue, span=span)
        self.request_metrics.accept(session)
        self._make_ready(session, raw)

    def close(self) -> None:
        """End every session with an error, then stop the engine."""
        self._loop.post(lambda: self._end_all(InternalError("the server is shutting down")))
        # Running preprocessing is not waited for: its sessions are answered, and its results are dropped.
        self._preprocess_pool.close()
        if self._loop.stop():
            self._leave_all()
            self._sender.ring.close()
            self._engine.close()

    def stats(self) -> StageStats:
        """Return the current figures; `sessions` counts slots in use, also those whose later stages still work."""
        held = sum(session.send_queue.held for session in list(self._open.values()))
        return self._health.stage_stats(len(self._slots.taken), held)

    def metrics(self) -> Iterator[Metric]:
        """Yield the metrics, see `stage.Stage`."""
        open_now = list(self._open.values())
        yield Metric("omni_sessions_limit", self._settings.max_sessions)
        yield from self._loop.clock.metrics()
        yield from self._health.metrics()
        yield from self._sender.metrics([session for session in open_now if not session.ended_ns])
        yield from self.request_metrics.metrics(open_now, self._slots.taken)
        yield from self._preprocess_pool.metrics()
        yield from memory_metrics(self._device)

    def _no_slot(self) -> OmniError:
        limit = self._settings.max_sessions
        return Overloaded(f"all {limit} sessions are in use", stage="thinker", retry_after_ms=RETRY_AFTER_MS)

    def _make_ready(self, session: OpenSession, raw: RawRequest) -> None:
        """Preprocess a request here or, if it may take long, on the pool. Either way the talker gets a message first
        and holds its request: if this process dies, the client is answered from there.
        """
        take_timeout = functools.partial(self._take_timeout, session)
        preprocessed = self._preprocess_pool.at_once(session, raw, take_timeout)
        if isinstance(preprocessed, Preprocessed):
            self._open_session(session, preprocessed)
        elif preprocessed is None:
            self._sender.send_message(session, ThinkerMessage(key=session.key, kind=Kind.HEARTBEAT))
        self._loop.post(functools.partial(self._register, session))
        if preprocessed is None:
            self._preprocess_pool.later(session, raw, take_timeout, functools.partial(self._post_admission, session))
        else:
            self._post_admission(session, preprocessed)

    def _post_admission(self, session: OpenSession, preprocessed: Preprocessed | OmniError) -> None:
        self._loop.post(functools.partial(self._admit, session, preprocessed))

    def _take_timeout(self, session: OpenSession, seconds: float) -> None:
        session.deadline_ns = session.accepted_ns + int(seconds * 1e9)
        # Set here, not by the loop, which may hang: the supervisor ends this process if the loop hangs beyond a
        # deadline.
        self._ledger.set_deadline(session.key, session.deadline_ns)

    # On the loop's thread.

    def has_work(self) -> bool:
        """Return True if the engine could advance now."""
        return self._health.has_work()

    def step(self) -> None:
        """Run one engine step; its output is sent as soon as the send queues allow."""
        outputs = self._engine.step()
        self.request_metrics.log_accepted()
        if outputs:
            self.request_metrics.batches.observe(len(outputs))
        pairs = [(session, output) for output in outputs if (session := self._open.get(output.key)) is not None]
        for session, output in pairs:
            if not session.ended_ns:
                self._handle_output(session, output)
        self._send(session for session, _ in pairs)

    def poll(self) -> float:
        """Check every session; see `loop.Driven`."""
        self._ledger.beat()
        self._health.refresh()
        if self._ledger.word(LEAVING) == ENDING:
            self._end_all(_leaving_error())
        now = time.monotonic_ns()
        self._sender.ring.find_ring(now)
        delay = min((self._look_after(session, now) for session in list(self._open.values())), default=IDLE_POLL_S)
        # After the look: nothing leaves for a session that has just ended.
        self._send(self._open.values())
        # Decided once an iteration: `has_work` and the sleep time must refer to the same moment.
        rule: Doing | None = "claim" if self._ledger.device_claimed() else "pause" if self._must_pause(now) else None
        paused = rule is not None
        self._engine.pause(paused)
        self._engine.confine(self._ledger.device_has_windows())
        self._loop.waits_for = self._health.waits_for(rule)
        if not self.has_work():
            self.request_metrics.log_accepted()
        return min(delay, CLAIMED_POLL_S) if paused else delay

    def _must_pause(self, now: int) -> bool:
        """Return True if every pending first window waits only for the later stages."""
        if not self._ledger.shares_device_with("token2wav"):
            return False
        policy, steps = self._settings.policy, self._engine.steps_under_way
        is_read = any(session.is_read for session in self._open.values())
        ready = (session.first_window_ready_ns(self._ledger, steps, now) for session in self._open.values())
        limit_ms = policy.pause_text_ms if is_read else policy.pause_ms
        return must_pause([since for since in ready if since is not None], now, limit_ms * NS_PER_MS)

    def fail(self, error: Exception) -> None:
        """Handle an exception of the engine: end every session with an error, refuse later ones."""
        self._health.fail(error, self._end_all)

    def _register(self, session: OpenSession) -> None:
        self._open[session.key.name] = session
        if self._health.failure is not None:
            self._fail(session, self._health.failure)

    def _admit(self, session: OpenSession, preprocessed: Preprocessed | OmniError) -> None:
        if session.ended_ns:
            return
        if isinstance(preprocessed, OmniError):
            self._fail(session, preprocessed)
            return
        if session.session is None:
            self._open_session(session, preprocessed)
        try:
            self._engine.add_sequence(
                session.key.name,
                preprocessed.placed,
                preprocessed.sampling,
                want_rows=preprocessed.session.want_audio,
                priority=preprocessed.session.priority,
            )
        except Exception as error:  # noqa: BLE001 - what the engine cannot take must not end the stage
            refusal = as_omni_error(error, session.label)
            refusal.stage = refusal.stage or "thinker"
            self._fail(session, refusal)
        else:
            self.request_metrics.prompt_tokens += preprocessed.session.prompt_tokens

    def _open_session(self, session: OpenSession, preprocessed: Preprocessed) -> None:
        """Send `OPEN` to the later stages; called by the loop, or before the loop has the session."""
        self._sender.send_message(session, session.open(preprocessed))

    def _handle_output(self, session: OpenSession, output: ThinkerOutput) -> None:
        if output.error is not None:
            kind = BadRequest if output.is_refused else InternalError
            self._fail(session, kind(output.error, stage="thinker"))
            return
        self.request_metrics.reply_tokens += len(output.token_ids)
        if session.reply_tokens == 0:
            self.request_metrics.cached_tokens += output.cached_tokens
        session.queue_output(output)
        session.send_queue.is_urgent = session.reply_tokens <= UNLIMITED_TOKENS

    def _send(self, sessions: Iterable[OpenSession]) -> None:
        sessions = list(sessions)
        for session in sessions:
            session.see_begin(self._ledger)
        self._sender.send(sessions, message_interval_ns(self._health.stats.running))

    def _when_refused(self, session: OpenSession, kind: Kind) -> None:
        """On the sending thread: end the session of a message that Triton refused, unless it is a heartbeat."""
        if kind != Kind.HEARTBEAT:
            self._loop.post(functools.partial(self._end_refused, session, kind))

    def _end_refused(self, session: OpenSession, kind: Kind) -> None:
        if kind == Kind.ERROR:
            # The message should have told the talker, which now reads it in the ledger.
            self._ledger.write(session.key, FAILED)
        self._fail(session, refused_error("thinker"))

    def _look_after(self, session: OpenSession, now: int) -> float:
        """Check one session; return the seconds until the next check."""
        lost = self._ledger.lost_stages(session.key)
        if lost and (session.refusal is not None or not session.ended_ns):
            self._end_lost(session, lost[0])
        elif session.refusal is not None:
            return self._try_leave(session, session.refusal, late=session.is_late(now))
        elif session.ended_ns:
            return self._try_release(session, now)
        elif self._ledger.awaits_talker(session.key) and not session.is_overdue(self._ledger, now):
            return SOON_S
        elif self._ledger.is_over(session.key):
            # If a failure ended it that has not reached token2wav, it is the talker's.
            self._end(session, refused_error("talker"))
        elif session.caller.is_direct(self._ledger, session.key, session.delivered, now):
            # Answered at once: no ensemble's request could leak, and no later stage has to end.
            self._drop(session)
            session.session = None
            self._answer_error(session, direct_calls.refusal(session.label))
        elif session.is_overdue(self._ledger, now):
            seconds = (session.deadline_ns - session.accepted_ns) / 1e9
            self._fail(session, DeadlineExceeded(f"timeout: {seconds:g} s have passed", stage="thinker"))
        else:
            if now - session.left_ns >= self._settings.heartbeat_ms * 1_000_000:
                self._sender.send_message(session, ThinkerMessage(key=session.key, kind=Kind.HEARTBEAT))
            return SOON_S if session.send_queue.waiting or session.report is not None else IDLE_POLL_S
        return SOON_S

    def _fail(self, session: OpenSession, error: OmniError) -> None:
        """End the session with an error: directly while no later stage holds it, else in-band through token2wav."""
        if session.ended_ns:
            return
        session.ending = RequestOutcome.of(error, "thinker")
        if session.session is None:
            # The talker then returns the heartbeat that it holds.
            self._ledger.write(session.key, FAILED)
        else:
            # Not marked as failed in the ledger: the talker would see that first, close, and not relay the message.
            self._sender.send_message(session, session.to_failure(error))
        self._end(session, error)

    def _end(self, session: OpenSession, error: OmniError) -> None:
        """Stop the session and close it as soon as possible, with `error` if no other stage answers its client."""
        self._drop(session)
        session.refusal = error
        self._try_leave(session, error, late=False)

    def _try_leave(self, session: OpenSession, error: OmniError, *, late: bool) -> float:
        """Leave the session to token2wav if that stage has it. Otherwise answer the error once no message is open or on
        its way; earlier, the error would leak the client's request.
        """
        ledger, key = self._ledger, session.key
        # Read first: a message that no stage holds any more has reached token2wav by now, or never will.
        alone = session.is_alone(ledger)
        is_answered = ledger.has(key, REACHED, "token2wav") or ledger.has(key, CANCELLED)
        if is_answered or (late and session.session is not None):
            session.refusal = None
            session.sender.finish(then=functools.partial(session.mark_closed, ledger))
        elif alone or late:
            session.session = None
            self._answer_error(session, error)
        return SOON_S

    def _answer_error(self, session: OpenSession, error: OmniError) -> None:
        session.refusal, session.ending = None, RequestOutcome.of(error, "thinker")
        self._slots.answer(session.key)
        session.sender.fail(error, functools.partial(session.mark_closed, self._ledger))

    def _end_lost(self, session: OpenSession, stage: StageName) -> None:
        """Answer the error of a dead stage at once: its requests stay open for ever, so waiting does not help."""
        self._drop(session)
        self._answer_error(session, session.refusal or lost_error(stage))

    def _leave_all(self) -> None:
        """Close the sessions that wait for other stages; after the loop's end nothing else does."""
        for session in self._open.values():
            if session.refusal is not None:
                self._try_leave(session, session.refusal, late=True)

    def _drop(self, session: OpenSession) -> None:
        session.stop()
        self._health.abort(session.key.name)

    def _try_release(self, session: OpenSession, now: int) -> float:
        silent = session.silent_stages(self._ledger)
        if silent and not session.is_late(now):
            return SOON_S
        if silent:
            logger.warning("request %s: %s did not close the session; its slot is reused", session.label, silent)
        del self._open[session.key.name]
        self.request_metrics.close(session)
        self._slots.release(session.key)
        return IDLE_POLL_S

    def _end_all(self, error: OmniError) -> None:
        for session in list(self._open.values()):
            self._fail(session, error)


def _leaving_error() -> Overloaded:
    """Return the error that refuses requests and ends sessions while the server stops."""
    return Overloaded("the server is shutting down", stage="thinker", retry_after_ms=RETRY_AFTER_RESTART_MS)


def _restart_refusal(stage: StageName) -> Overloaded:
    """Return the error that refuses a request while `stage` restarts."""
    return Overloaded(f"{stage} is being started again", stage=stage, retry_after_ms=RETRY_AFTER_RESTART_MS)
