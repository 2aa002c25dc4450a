# SPDX-License-Identifier: Apache-2.0
"""Base of talker and token2wav: opens sessions, then checks, copies and returns messages of the previous stage.

A session's `OPEN` request is the one sender of all that the stage answers; every later message's request is ended
as soon as the engine was told to copy its tensors. It knows no engine's kind, no Triton.
"""

from __future__ import annotations

import functools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from triton_omni.core.errors import ErrorCode, InternalError, OmniError, Overloaded, StageName
from triton_omni.core.events import log_event
from triton_omni.core.metrics import POWERS, Histogram, LeakWatch, Metric
from triton_omni.core.streams import settle_thread
from triton_omni.core.tracing import NO_SPAN, Span, Tracer
from triton_omni.link.inbox import Inbox
from triton_omni.link.latency import LinkLatency, Until
from triton_omni.link.ring import Ring
from triton_omni.link.ring_reader import News, RingReader
from triton_omni.session.engine import AnyEngine
from triton_omni.session.engine_health import EngineHealth
from triton_omni.session.ledger import SessionLedger
from triton_omni.session.ledger_table import CLOSED, FAULTS, STAGES
from triton_omni.session.loop import IDLE_POLL_S, StageLoop
from triton_omni.session.outcome import OUTCOMES
from triton_omni.session.stage import SOON_S, ResponseSender, StageStats, as_omni_error, lost_error, memory_metrics
from triton_omni.session.wire import Kind, Session, SessionKey, TalkerMessage, ThinkerMessage, Unreadable, Value

logger = logging.getLogger(__name__)


@dataclass
class LinkSession:
    """State of one session; touched by the loop's thread only."""

    key: SessionKey
    sender: ResponseSender
    session: Session
    expected: int = 1
    consumed: int = 0
    by_message: int = 0
    """Rows or codes that came in messages."""
    fetched: int = 0
    """Those that came by the ring."""
    to_fetch: int | None = None
    """How many will have, once all have; None = not yet known."""
    orphaned_ns: int = 0
    """When it was first seen that the thinker had ended it; 0 = it has not."""
    span: Span = NO_SPAN


MessageT = TypeVar("MessageT", ThinkerMessage, TalkerMessage)
SessionT = TypeVar("SessionT", bound=LinkSession)


class LinkStage(ABC, Generic[MessageT, SessionT]):
    """A stage that takes messages of the stage before.

    Args:
        name: of this stage.
        engine: stepped by this stage's loop alone.
        device: where the engine copies what it is fed.
        tracer: of the stage's spans.
        ring: by which rows or codes come past Triton; None = all come in messages.
    """

    def __init__(
        self,
        name: StageName,
        engine: AnyEngine,
        ledger: SessionLedger,
        *,
        device: torch.device,
        tracer: Tracer,
        ring: Ring | None,
    ) -> None:
        self._name = name
        self._tracer = tracer
        self._link_engine = engine
        self._ledger = ledger
        self._device = device
        self._open: dict[str, SessionT] = {}
        self._loop = StageLoop(f"omni-{name}", self)
        self._health = EngineHealth(name, engine, ledger)
        self._inbox = Inbox(ledger, device)
        self._ring_reader = None if ring is None else RingReader(ledger, ring, device, self._loop.wake)
        self._seal = ledger.seal(STAGES[STAGES.index(name) - 1])
        self._batches = Histogram(POWERS)
        self._leaks = LeakWatch()

    @property
    def link_latency(self) -> Mapping[Until, LinkLatency]:
        """Latency of rows and codes from the stage before."""
        return self._inbox.latency

    # Called from any thread.

    def start(self) -> None:
        """Begin to serve."""
        self._loop.post(functools.partial(settle_thread, self._device))
        self._loop.start()

    def submit(self, tensors: Mapping[str, Value], sender: ResponseSender) -> None:
        """Take one message; its response sender is finished when it was copied, or at the session's end if it is
        `OPEN`.

        Raises:
            Unsealed: the stage before did not send it; the response sender is still open.
            InternalError: it is no message of this protocol; the response sender is still open.
        """
        try:
            message, arrived_ns = self._parse(tensors), time.monotonic_ns()
        except Unreadable as error:
            self._loop.post(functools.partial(self._fail_unread, error))
            raise
        sender.bind(message.key.slot)
        if not self._inbox.is_new(message):
            sender.finish()
            return
        self._relay(message, sender)
        self._inbox.watch_for_cancel(message.key, sender, arrived_ns)
        self._loop.post(functools.partial(self._receive, message, sender, arrived_ns))

    def close(self) -> None:
        """End every session with an error, then stop the engine."""
        self._loop.post(lambda: self._fail_all(InternalError("the server is shutting down", stage=self._name)))
        if self._ring_reader is not None:
            self._ring_reader.hush()
        if self._loop.stop():
            self._end_all()
            self._link_engine.close()
            if self._ring_reader is not None:
                self._ring_reader.close()

    def stats(self) -> StageStats:
        """Figures of the last poll."""
        engine = self._health.stats
        return StageStats(
            len(self._open), engine.running, engine.waiting, engine.kv_blocks_used, engine.rows_used, self._held()
        )

    def metrics(self) -> Iterator[Metric]:
        """Figures by the names of their metrics, see `stage.Stage`."""
        yield Metric("omni_kv_blocks_limit", self._health.stats.kv_blocks_limit)
        yield Metric("omni_supervisor_faults", self._ledger.word(FAULTS))
        yield Metric("omni_leaked_sessions", self._leaks.count(self._overstayed()))
        yield from self._batches.metrics("omni_batch_size")
        if self._ring_reader is not None:
            size, labels = self._ring_reader.fetched_bytes, {"tensor": "ring", "device": self._device.type}
            yield Metric("omni_link_bytes_total", size, labels)
        yield from memory_metrics(self._device)

    def _overstayed(self) -> list[str]:
        """Sessions held here that are over for the thinker."""
        ledger, held = self._ledger, [session.key for session in list(self._open.values())]
        return [key.name for key in held if not ledger.holds(key) or ledger.has(key, CLOSED, "thinker")]

    def _relay(self, message: MessageT, sender: ResponseSender) -> None:
        """Answer at once what need not wait for the loop, which may be in the middle of a step."""

    # On the loop's thread.

    def has_work(self) -> bool:
        """True if the engine could advance now."""
        return self._health.has_work()

    def poll(self) -> float:
        """Look after every session; see `loop.Driven`."""
        self._ledger.beat()
        self._health.refresh()
        if self._ring_reader is not None:
            self._fetch_all(self._ring_reader)
        self._look_around()
        return min((self._attend(session) for session in list(self._open.values())), default=IDLE_POLL_S)

    def fail(self, error: Exception) -> None:
        """The engine raised: every session ends with an error, later ones fail when they open."""
        self._health.fail(error, self._fail_all)

    def _look_around(self) -> None:
        """Hook that runs at every poll, after new messages are taken and before sessions are looked after."""

    @abstractmethod
    def step(self) -> None:
        """One engine step; what it gave leaves at once."""

    @abstractmethod
    def _parse(self, tensors: Mapping[str, Value]) -> MessageT:
        """The message of these tensors. Raises `Unsealed`, `InternalError`."""

    @abstractmethod
    def _begin(self, message: MessageT, request: Session, sender: ResponseSender) -> SessionT:
        """Open a session and answer what must be answered first."""

    @abstractmethod
    def _open_sequence(self, session: SessionT, message: MessageT) -> None:
        """Open it in the engine. An exception ends the session."""

    @abstractmethod
    def _take_message(self, session: SessionT, message: MessageT, sender: ResponseSender) -> None:
        """Deal with a message that came in its order, and give it back. An exception ends the session."""

    @abstractmethod
    def _take_placed(self, session: SessionT, tensor: torch.Tensor) -> None:
        """Feed the engine rows or codes that came by the ring."""

    def _settle(self) -> None:
        """Have the engine enqueue the copies of what it was fed, if it has not."""

    @abstractmethod
    def _end_input(self, session: SessionT) -> None:
        """Tell the engine that no more come."""

    @abstractmethod
    def _look_after(self, session: SessionT) -> float:
        """One session's poll; returns the seconds until it should be looked at again."""

    @abstractmethod
    def _fail(self, session: SessionT, error: OmniError) -> None:
        """Give the session up with this error."""

    @abstractmethod
    def _answer_error(self, session: SessionT, error: OmniError) -> None:
        """End the session's `OPEN` request with this error at once, and drop the session."""

    def _held(self) -> int:
        """Rows or codes that wait to leave."""
        return 0

    def _end_all(self) -> None:
        """Whatever the loop has left to do for open sessions once it has stopped."""

    def _attend(self, session: SessionT) -> float:
        """End a session that lost a stage, else look after it.

        The dead stage's requests stay open for ever, so waiting gains nothing. Each stage that is left answers, since
        any of them may hold the only request that reaches the client.
        """
        lost = self._ledger.lost_stages(session.key)
        if not lost:
            return self._look_after(session)
        self._answer_error(session, lost_error(lost[0]))
        return SOON_S

    def _receive(self, message: MessageT, sender: ResponseSender, arrived_ns: int) -> None:
        session = self._open.get(message.key.name)
        if not self._ledger.holds(message.key):
            sender.finish()
        elif lost := self._ledger.lost_stages(message.key):
            sender.fail(lost_error(lost[0]), functools.partial(self._ledger.count_returned, message.key))
        elif message.kind == Kind.OPEN and session is None and message.session is not None:
            self._enter(message, message.session, sender)
        elif session is None or message.kind in (Kind.HEARTBEAT, Kind.OPEN):
            self._inbox.give_back(message.key, sender)
        else:
            if message.kind == Kind.DATA:
                self._inbox.observe(message.sent_ns, arrived_ns)
            try:
                self._take_in_order(session, message, sender)
            except Exception as error:  # noqa: BLE001 - one bad message must not end the stage
                self._inbox.give_back(message.key, sender)
                self._fail(session, as_omni_error(error, session.session.request_id))

    def _fail_unread(self, error: Unreadable) -> None:
        """End the session of a message that could not be read: without that message its reply has a hole."""
        if (session := self._open.get(error.key.name)) is not None and self._ledger.holds(error.key):
            self._fail(session, InternalError(f"a message could not be read: {error.message}", stage=self._name))

    def _fetch_all(self, ring_reader: RingReader) -> None:
        """Take what the stage before has placed; places are free again once the engine has copied them."""
        ring_reader.free()
        fetched = []
        for session in list(self._open.values()):
            if (news := ring_reader.news(session.key, session.fetched, session.by_message)) is not None:
                self._take_news(session, news)
                fetched.append((session.key, news.total))
        if fetched:
            self._settle()
            ring_reader.enqueued(fetched)

    def _take_news(self, session: SessionT, news: News) -> None:
        self._inbox.observe(news.sent_ns, news.arrived_ns)
        session.fetched = news.total
        try:
            for part in news.parts:
                self._take_placed(session, part)
            self._end_if_all_came(session)
        except Exception as error:  # noqa: BLE001 - what the engine cannot take must not end the stage
            self._fail(session, as_omni_error(error, session.session.request_id))

    def _await_placed(self, session: SessionT, count: int) -> None:
        """No more rows or codes come than those in messages and `count` by the ring."""
        session.to_fetch = count
        self._end_if_all_came(session)

    def _end_if_all_came(self, session: SessionT) -> None:
        if session.to_fetch is not None and session.fetched >= session.to_fetch:
            self._end_input(session)

    def _enter(self, message: MessageT, request: Session, sender: ResponseSender) -> None:
        session = self._open[message.key.name] = self._begin(message, request, sender)
        session.span = self._tracer.start_span(request.traceparent, time.monotonic_ns())
        if self._health.failure is not None:
            self._fail(session, self._health.failure)
            return
        try:
            self._open_where_room_is(session, message)
        except Exception as error:  # noqa: BLE001 - what the engine cannot take must not end the stage
            self._fail(session, as_omni_error(error, request.request_id))

    def _open_where_room_is(self, session: SessionT, message: MessageT) -> None:
        """Open the sequence in the engine, if need be after closing sessions that are over. A client that interrupts a
        reply asks again at once.
        """
        try:
            self._open_sequence(session, message)
        except Overloaded:
            for other in list(self._open.values()):
                if other is not session:
                    self._attend(other)
            self._open_sequence(session, message)

    def _take_in_order(self, session: SessionT, message: MessageT, sender: ResponseSender) -> None:
        # A failure may be that of a message before it, which the stage before could not send.
        if message.sequence != session.expected and message.failure is None:
            wrong = f"message {message.sequence} came where {session.expected} was due"
            raise InternalError(wrong, stage=self._name)
        session.expected += 1
        self._take_message(session, message, sender)

    def _log(self, session: SessionT, event: str, **fields: str | float | None) -> None:
        """A record of the log about the session, with its age."""
        age_ns = time.monotonic_ns() - session.session.accepted_ns
        names = {"request": session.session.request_id, "session": session.key.name}
        log_event(logger, event, stage=self._name, **names, **fields, seconds=age_ns / 1e9)

    def _tell_end(self, session: SessionT, code: ErrorCode | None, **figures: str | float | None) -> None:
        """The session's last record, and the end of its span: it was answered whole, or ended by an error."""
        outcome = OUTCOMES[code] if code else "finished"
        self._log(session, outcome, code=code, **figures)
        names = {"request": session.session.request_id, "session": session.key.name}
        session.span.end(code, outcome=outcome, **names, **figures)

    def _fail_all(self, error: OmniError) -> None:
        for session in list(self._open.values()):
            self._fail(session, error)
