# SPDX-License-Identifier: Apache-2.0
"""A stage's end of the link from the stage before. Items (rows or codes) arrive in messages of the ensemble or in a
shared ring (`link/ring.py`); either way the receiver feeds them to the engine and gives their memory back.

It also keeps a histogram of how long items take: all stages of a server share one host and its monotonic clock. It
knows no engine's kind, no Triton.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

import torch
from torch import Tensor

from triton_omni.core.gpu import record_event
from triton_omni.core.metrics import Histogram, Metric
from triton_omni.core.tracing import NO_SPAN, Span
from triton_omni.link.ring import Doorbell, Ring
from triton_omni.session.engine import FedEngine
from triton_omni.session.ledger import SessionLedger
from triton_omni.session.ledger_table import CANCELLED, CAPACITY, CLOSED, CONSUMED, FETCHED, PLACED, STAGES
from triton_omni.session.stage import ResponseSender
from triton_omni.session.wire import Session, SessionKey, TalkerMessage, ThinkerMessage

CANCEL_INTERVAL_NS: Final = 50_000_000
"""Minimum nanoseconds between two questions to Triton whether a session's client is gone."""

Until = Literal["arrived", "taken"]
"""End of a hop: arrival in the next stage's process, or its loop's next turn, after the step that runs."""

BOUNDS_S: Final = (
    *(1e-4, 2e-4, 3e-4, 5e-4, 7e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 7e-3),
    *(1e-2, 1.5e-2, 2e-2, 3e-2, 5e-2, 0.1, 0.2, 0.5, 1.0),
)
"""Upper bounds of the buckets, seconds; a last one has no bound."""


class LinkLatency(Histogram):
    """A histogram of seconds."""

    def __init__(self) -> None:
        super().__init__(BOUNDS_S)

    def measure(self, sent_ns: int, now_ns: int) -> None:
        """Count what was sent and received at these times of the monotonic clock, in nanoseconds."""
        self.observe(max(0, now_ns - sent_ns) / 1e9)


@dataclass
class LinkSession:
    """State of one session at the receiving end; touched by the loop's thread only."""

    key: SessionKey
    sender: ResponseSender
    session: Session
    is_fed: bool = field(init=False)
    """True while the engine takes the session's items."""
    expected: int = 1
    consumed: int = 0
    by_message: int = 0
    """Items that came in messages."""
    by_ring: int = 0
    """Items that came in the ring."""
    ring_total: int | None = None
    """Number of items that come in the ring; None = not yet known."""
    orphaned_ns: int = 0
    """When it was first seen that the thinker had ended it; 0 = it has not."""
    span: Span = NO_SPAN

    def __post_init__(self) -> None:
        self.is_fed = self.session.want_audio


SessionT = TypeVar("SessionT", bound=LinkSession)


class LinkReceiver:
    """Takes the items of all sessions of one stage. Used by the loop's thread unless a method says otherwise.

    Args:
        ledger: of the stage that receives; gets the counts of consumed messages and ended requests.
        engine: is fed the items.
        device: where the engine copies what it is fed, and the device of the ring.
        ring: None = all items come in messages.
        wake: called on another thread when there is something new in the ring.

    Raises:
        OSError: another process has the stage's doorbell.
    """

    def __init__(
        self,
        ledger: SessionLedger,
        engine: FedEngine,
        device: torch.device,
        ring: Ring | None,
        wake: Callable[[], object],
    ) -> None:
        self._ledger, self._engine, self._device, self._ring, self._wake = ledger, engine, device, ring, wake
        self._before = STAGES[STAGES.index(ledger.stage) - 1]
        # By slot, when Triton was last asked for a cancel; of Triton's thread.
        self._asked_ns = [0] * CAPACITY
        # By slot: the session that the last message was of, and that message's number; of Triton's thread.
        self._newest = [(0, 0)] * CAPACITY
        self.latency: dict[Until, LinkLatency] = {"arrived": LinkLatency(), "taken": LinkLatency()}
        """Latency of items, measured whenever some of a session are taken."""
        self._rung_ns = 0
        self._copies: deque[tuple[torch.cuda.Event | None, Sequence[tuple[SessionKey, int]]]] = deque()
        """Sessions and item counts of copies that the device may not have finished."""
        self._ring_bytes = 0
        self._doorbell = None if ring is None else Doorbell(ledger.name, ledger.stage, self._hear)

    # Messages, on Triton's thread.

    def is_new(self, message: ThinkerMessage | TalkerMessage) -> bool:
        """Return True for the first message of its number, or a later one, of an open session. Others change nothing:
        the session is over, or a client sent the message again on its own.
        """
        key = message.key
        generation, newest = self._newest[key.slot]
        if not self._ledger.holds(key) or (key.generation == generation and message.number <= newest):
            return False
        self._newest[key.slot] = key.generation, message.number
        return True

    def watch_for_cancel(self, key: SessionKey, sender: ResponseSender, now_ns: int) -> None:
        """Ask Triton whether the client is gone: a call into its process, so not at each of a session's messages. A
        later one tells it too, and a silent session has heartbeats.
        """
        if now_ns - self._asked_ns[key.slot] < CANCEL_INTERVAL_NS:
            return
        self._asked_ns[key.slot] = now_ns
        sender.if_cancelled(functools.partial(self._ledger.write, key, CANCELLED))

    # Messages, on the loop's thread.

    def observe(self, sent_ns: int, arrived_ns: int) -> None:
        """Measure the latency of items that are taken now; times are monotonic nanoseconds."""
        self.latency["arrived"].measure(sent_ns, arrived_ns)
        self.latency["taken"].measure(sent_ns, time.monotonic_ns())

    def feed_message(
        self,
        session: LinkSession,
        message: ThinkerMessage | TalkerMessage,
        tensor: Tensor | None,
        sender: ResponseSender,
    ) -> None:
        """Feed a message's items, if it has any, and end its request; its credit goes back with it."""
        if tensor is None:
            self.give_back(message.key, sender)
            return
        self._feed(session, tensor)
        session.consumed += 1
        session.by_message += len(tensor)
        # The tensor is not in Triton's memory any more, so nothing waits for its copy. A long step may precede the
        # copy; the memory is reused only after it.
        sender.finish(self._outlive_copy(tensor), functools.partial(self._count_consumed, message, session.consumed))

    def give_back(self, key: SessionKey, sender: ResponseSender) -> None:
        """End a message's request; Triton may reuse its tensors."""
        sender.finish(then=functools.partial(self._ledger.count_returned, key))

    def mark_closed(self, key: SessionKey, sent: int = 0) -> None:
        """Record that the session's `OPEN` request has ended, too, after `sent` messages to the next stage."""
        # In this order: once the sender sees that all its requests have ended, it can read this count.
        self._ledger.write(key, CLOSED, sent)
        self._ledger.count_returned(key)

    def expect(self, session: LinkSession, by_ring: int) -> None:
        """No more items come than those of messages so far and `by_ring` in the ring: end the engine's input then."""
        session.ring_total = by_ring
        self._end_if_all_came(session)

    # The ring.

    def fetch(
        self,
        sessions: Iterable[SessionT],
        fed: Callable[[SessionT], None],
        fail: Callable[[SessionT, Exception], object],
    ) -> None:
        """Feed all new items in the ring; places are free again once the engine has copied them.

        Args:
            fed: called for each session after its new items, before the end of its input.
            fail: ends a session whose items the engine does not take.
        """
        self._free_places()
        counts = []
        for session in sessions:
            if not (parts := self._find_parts(session)):
                continue
            counts.append((session.key, session.by_ring))
            try:
                for part in parts:
                    self._feed(session, part)
                fed(session)
                self._end_if_all_came(session)
            except Exception as error:  # noqa: BLE001 - what the engine cannot take must not end the stage
                fail(session, error)
        if counts:
            self._engine.settle()
            self._copies.append((record_event(self._device), counts))

    def metrics(self) -> Iterator[Metric]:
        """Yield the bytes that came in the ring; those of messages are counted where Triton gives them."""
        if self._ring is not None:
            labels = {"tensor": "ring", "device": self._device.type}
            yield Metric("omni_link_bytes_total", self._ring_bytes, labels)

    def hush(self) -> None:
        """Stop calling `wake`; may be called from any thread."""
        if self._doorbell is not None:
            self._doorbell.close()

    def close(self) -> None:
        """Leave the ring; nothing of it may be in use."""
        if self._ring is not None:
            self._ring.close()

    def _feed(self, session: LinkSession, tensor: Tensor) -> None:
        if session.is_fed:
            self._engine.feed(session.key.name, tensor)

    def _end_if_all_came(self, session: LinkSession) -> None:
        if session.is_fed and session.ring_total is not None and session.by_ring >= session.ring_total:
            self._engine.end(session.key.name)

    def _find_parts(self, session: LinkSession) -> list[Tensor]:
        """Return the session's new items in their order, in the ring itself; none while a message before is missing."""
        key, fetched = session.key, session.by_ring
        if self._ring is None or self._ledger.count(key, PLACED, self._before) == fetched:
            return []
        placed = self._ledger.placing(key, self._before)
        if placed.by_message != session.by_message or placed.total <= fetched:
            return []
        parts = self._ring.parts(key.slot, fetched, placed.total - fetched)
        session.by_ring = placed.total
        self._ring_bytes += sum(part.nbytes for part in parts)
        # By this look, where it came before the bell was heard.
        self.observe(placed.sent_ns, self._rung_ns if self._rung_ns >= placed.sent_ns else time.monotonic_ns())
        return parts

    def _free_places(self) -> None:
        """Give the places back of which the device has made the copies."""
        while self._copies and (self._copies[0][0] is None or self._copies[0][0].query()):  # type: ignore[no-untyped-call]
            for key, total in self._copies.popleft()[1]:
                self._ledger.write(key, FETCHED, total)

    def _hear(self) -> None:
        self._rung_ns = time.monotonic_ns()
        self._wake()

    def _outlive_copy(self, tensor: Tensor) -> torch.cuda.Event | None:
        """Keep a tensor's memory until the engine's copy is done; return an event to wait for where torch cannot.

        Torch looks for the stream's end where the tensor is let go, which the engine does once the copy is enqueued.
        """
        if tensor.is_cuda and tensor.device == self._device:
            tensor.record_stream(torch.cuda.current_stream(self._device))
            return None
        return record_event(self._device)

    def _count_consumed(self, message: ThinkerMessage | TalkerMessage, consumed: int) -> None:
        # A message on another device than the engine's is kept until here.
        self._ledger.write(message.key, CONSUMED, consumed)
        self._ledger.count_returned(message.key)
