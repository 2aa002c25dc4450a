# SPDX-License-Identifier: Apache-2.0
"""Sessions of talker and token2wav: opened by the stage before, fed by its messages, ended with the stages that die.

A session's `OPEN` request is the one sender of all that the stage answers; every later message's request is ended
as soon as the engine was told to copy its tensors. It knows no engine's kind, no Triton.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

from triton_omni.core.errors import ErrorCode, InternalError, OmniError, Overloaded
from triton_omni.core.logs import log_event
from triton_omni.core.metrics import LeakWatch, Metric
from triton_omni.core.tracing import Tracer
from triton_omni.link.receiver import LinkReceiver, LinkSession
from triton_omni.session.engine_health import EngineHealth
from triton_omni.session.ledger import SessionLedger
from triton_omni.session.ledger_table import CLOSED
from triton_omni.session.loop import IDLE_POLL_S, StageLoop
from triton_omni.session.outcome import OUTCOMES
from triton_omni.session.stage import SOON_S, ResponseSender, as_omni_error, lost_error
from triton_omni.session.wire import Kind, Session, TalkerMessage, ThinkerMessage, Unreadable, Value

MessageT = TypeVar("MessageT", ThinkerMessage, TalkerMessage)
MessageT_contra = TypeVar("MessageT_contra", ThinkerMessage, TalkerMessage, contravariant=True)
SessionT = TypeVar("SessionT", bound=LinkSession)

logger = logging.getLogger(__name__)


class Arrival(NamedTuple, Generic[MessageT]):
    """One new message of a session."""

    message: MessageT
    sender: ResponseSender
    arrived_ns: int
    """Monotonic time, nanoseconds."""


class SessionHandler(Protocol[MessageT_contra, SessionT]):
    """A stage's part in the life of its sessions; every method is called on the loop's thread."""

    def open_session(self, message: MessageT_contra, request: Session, sender: ResponseSender) -> SessionT:
        """Return the state of a new session, and answer what must be answered first."""

    def open_sequence(self, session: SessionT, message: MessageT_contra) -> None:
        """Open the session in the engine. An exception ends the session."""

    def take_message(self, session: SessionT, message: MessageT_contra, sender: ResponseSender) -> None:
        """Handle a message that came in its order, and give it back. An exception ends the session."""

    def look_after(self, session: SessionT) -> float:
        """Check one session; return the seconds until the next check."""

    def fail_session(self, session: SessionT, error: OmniError) -> None:
        """Give the session up with this error."""

    def answer_error(self, session: SessionT, error: OmniError) -> None:
        """End the session's `OPEN` request with this error at once, and drop the session."""


class LinkSessions(Generic[MessageT, SessionT]):
    """The open sessions of one stage.

    Args:
        ledger: of the stage.
        loop, health, receiver, handler: of the stage.
        parse: returns the message of a request's tensors. It raises `Unsealed`, `InternalError`.
        tracer: of the stage's spans.
    """

    def __init__(
        self,
        ledger: SessionLedger,
        *,
        loop: StageLoop,
        health: EngineHealth,
        receiver: LinkReceiver,
        handler: SessionHandler[MessageT, SessionT],
        parse: Callable[[Mapping[str, Value]], MessageT],
        tracer: Tracer,
    ) -> None:
        self._stage, self._ledger, self._loop = ledger.stage, ledger, loop
        self._health, self._receiver, self._tracer = health, receiver, tracer
        self._handler: SessionHandler[MessageT, SessionT] = handler
        self._parse: Callable[[Mapping[str, Value]], MessageT] = parse
        self._leaks = LeakWatch()
        self.open: dict[str, SessionT] = {}
        """By name; changed by the loop's thread only."""

    # On Triton's thread.

    def accept(self, tensors: Mapping[str, Value], sender: ResponseSender) -> Arrival[MessageT] | None:
        """Read one message. None = it is not new, and its request has been ended.

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
        if self._receiver.is_new(message):
            return Arrival(message, sender, arrived_ns)
        sender.finish()
        return None

    # On any thread.

    def shut_down(self) -> bool:
        """End every session with an error, then the loop; return False if an engine step hangs."""
        error = InternalError("the server is shutting down", stage=self._stage)
        self._loop.post(functools.partial(self.fail_all, error))
        self._receiver.hush()
        return self._loop.stop()

    def metrics(self) -> Iterator[Metric]:
        """Yield the number of sessions held here that are over for the thinker."""
        held = [session.key for session in list(self.open.values())]
        over = [key.name for key in held if not self._ledger.holds(key) or self._ledger.has(key, CLOSED, "thinker")]
        yield Metric("omni_leaked_sessions", self._leaks.count(over))

    # On the loop's thread.

    def receive(self, arrival: Arrival[MessageT]) -> None:
        """Open the session of an `OPEN` message; give other messages to an open session in their order."""
        message, sender, arrived_ns = arrival
        session = self.open.get(message.key.name)
        if not self._ledger.holds(message.key):
            sender.finish()
        elif lost := self._ledger.lost_stages(message.key):
            sender.fail(lost_error(lost[0]), functools.partial(self._ledger.count_returned, message.key))
        elif message.kind == Kind.OPEN and session is None and message.session is not None:
            self._enter(message, message.session, sender)
        elif session is None or message.kind in (Kind.HEARTBEAT, Kind.OPEN):
            self._receiver.give_back(message.key, sender)
        else:
            if message.kind == Kind.DATA:
                self._receiver.observe(message.sent_ns, arrived_ns)
            try:
                self._take_in_order(session, message, sender)
            except Exception as error:  # noqa: BLE001 - one bad message must not end the stage
                self._receiver.give_back(message.key, sender)
                self.fail(session, error)

    def fetch(self, fed: Callable[[SessionT], None]) -> None:
        """Take what came in the ring; `fed` is called for each session with new items. An exception ends a session."""
        self._receiver.fetch(list(self.open.values()), fed, self.fail)

    def look_after_all(self) -> float:
        """Check every session; return the seconds until the next check."""
        return min((self._attend(session) for session in list(self.open.values())), default=IDLE_POLL_S)

    def fail(self, session: SessionT, error: Exception) -> None:
        """Give a session up."""
        self._handler.fail_session(session, as_omni_error(error, session.session.request_id))

    def fail_all(self, error: OmniError) -> None:
        """Give every session up."""
        for session in list(self.open.values()):
            self._handler.fail_session(session, error)

    def log(self, session: SessionT, event: str, **fields: str | float | None) -> None:
        """Write a log record about the session, with its age."""
        age_ns = time.monotonic_ns() - session.session.accepted_ns
        names = {"request": session.session.request_id, "session": session.key.name}
        log_event(logger, event, stage=self._stage, **names, **fields, seconds=age_ns / 1e9)

    def log_end(self, session: SessionT, code: ErrorCode | None, **fields: str | float | None) -> None:
        """Write the session's last record, and end its span: it was answered whole, or ended by an error."""
        outcome = OUTCOMES[code] if code else "finished"
        self.log(session, outcome, code=code, **fields)
        names = {"request": session.session.request_id, "session": session.key.name}
        session.span.end(code, outcome=outcome, **names, **fields)

    def _attend(self, session: SessionT) -> float:
        """End a session that lost a stage, else look after it.

        The dead stage's requests stay open for ever, so waiting gains nothing. Each stage that is left answers, since
        any of them may hold the only request that reaches the client.
        """
        lost = self._ledger.lost_stages(session.key)
        if not lost:
            return self._handler.look_after(session)
        self._handler.answer_error(session, lost_error(lost[0]))
        return SOON_S

    def _fail_unread(self, error: Unreadable) -> None:
        """End the session of a message that could not be read: without that message its reply has a hole."""
        if (session := self.open.get(error.key.name)) is not None and self._ledger.holds(error.key):
            self.fail(session, InternalError(f"a message could not be read: {error.message}", stage=self._stage))

    def _enter(self, message: MessageT, request: Session, sender: ResponseSender) -> None:
        session = self.open[message.key.name] = self._handler.open_session(message, request, sender)
        session.span = self._tracer.start_span(request.traceparent, time.monotonic_ns())
        if self._health.failure is not None:
            self.fail(session, self._health.failure)
            return
        try:
            self._open_where_room_is(session, message)
        except Exception as error:  # noqa: BLE001 - what the engine cannot take must not end the stage
            self.fail(session, error)

    def _open_where_room_is(self, session: SessionT, message: MessageT) -> None:
        """Open the sequence in the engine, if need be after closing sessions that are over. A client that interrupts a
        reply asks again at once.
        """
        try:
            self._handler.open_sequence(session, message)
        except Overloaded:
            for other in list(self.open.values()):
                if other is not session:
                    self._attend(other)
            self._handler.open_sequence(session, message)

    def _take_in_order(self, session: SessionT, message: MessageT, sender: ResponseSender) -> None:
        # A failure may be that of a message before it, which the stage before could not send.
        if message.sequence != session.expected and message.failure is None:
            wrong = f"message {message.sequence} came where {session.expected} was due"
            raise InternalError(wrong, stage=self._stage)
        session.expected += 1
        self._handler.take_message(session, message, sender)
