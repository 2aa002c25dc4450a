# SPDX-License-Identifier: Apache-2.0
"""A stage's end of the link to the next stage. Items (rows or codes) leave by one of two carriers: messages of the
ensemble, or a shared ring (`link/ring.py`). Text leaves in messages. It knows no engine, no Triton.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from triton_omni.core.errors import StageName
from triton_omni.core.gpu import await_side_stream, on_side_stream
from triton_omni.core.logs import LastingFailure
from triton_omni.core.metrics import Metric
from triton_omni.link.ring import DoorbellRinger, Ring, RingError, open_ring
from triton_omni.link.send_queue import Batch, RingBatch, SendQueue
from triton_omni.session.answer import Sent
from triton_omni.session.ledger import Placed, SessionLedger
from triton_omni.session.ledger_table import CONSUMED, EPOCH, FETCHED
from triton_omni.session.server_folder import LedgerError
from triton_omni.session.stage import ResponseSender
from triton_omni.session.wire import Kind, SessionKey, TalkerMessage, ThinkerMessage

LOOK_NS: Final = 500_000_000
"""Minimum nanoseconds between two searches for a ring that is not offered yet."""

logger = logging.getLogger(__name__)


class Sending(Protocol):
    """Data that the sender needs of a session, and counts that it keeps there."""

    key: SessionKey
    sender: ResponseSender
    send_queue: SendQueue
    sequence: int
    """Number of messages so far except heartbeats."""
    sent: int
    """Number of all messages so far."""
    refused: int
    """Number of those that Triton refused; counted by the sending thread."""
    left_ns: int
    """Monotonic time of the last message, nanoseconds."""


SessionT = TypeVar("SessionT", bound=Sending)
MessageT = TypeVar("MessageT", ThinkerMessage, TalkerMessage)


class LinkSender(Generic[SessionT, MessageT]):
    """Sends the items and texts of all sessions to the next stage. Used by the loop's thread. Other threads may read
    the metrics, and send the messages of a session that the loop does not have yet.

    Args:
        ledger: of the stage that sends.
        to: the next stage.
        device: of the items.
        wanted: returns the number of items, from the first on, below which the next stage cannot go on with a session
            that it has started; None = it can use each item.
        to_message: returns the message with a batch.
        to_tensors: returns a message's tensors, sealed.
        when_refused: called on the sending thread for each message that Triton refused.
    """

    def __init__(
        self,
        ledger: SessionLedger,
        to: StageName,
        device: torch.device,
        *,
        wanted: Callable[[SessionT], int | None],
        to_message: Callable[[SessionT, Batch], MessageT],
        to_tensors: Callable[[MessageT], Mapping[str, Sent]],
        when_refused: Callable[[SessionT, Kind], object],
    ) -> None:
        self._ledger, self._to = ledger, to
        self._wanted, self._when_refused = wanted, when_refused
        self._to_message: Callable[[SessionT, Batch], MessageT] = to_message
        self._to_tensors: Callable[[MessageT], Mapping[str, Sent]] = to_tensors
        self.ring = RingWriter(ledger, to, device)

    def send(self, sessions: Iterable[SessionT], interval_ns: int) -> None:
        """Send what may leave: items by the ring first, then messages, those of one session `interval_ns` apart."""
        sessions = list(sessions)
        # In this order: one message takes longer than the items of all sessions.
        for session in sessions:
            queue = session.send_queue
            if queue.held or queue.announced < queue.given:
                room = self.ring.room(session.key, queue.placed)
                if batch := queue.pop_ring_batch(room, self.ring.places, self._wanted_of(session)):
                    self.ring.carry(session.key, batch)
        self.ring.flush()
        for session in sessions:
            if not session.send_queue.idle:
                self._send_batches(session, interval_ns)

    def send_message(self, session: SessionT, message: MessageT, ready: torch.cuda.Event | None = None) -> None:
        """Number and send one message, after `ready`."""
        session.left_ns = time.monotonic_ns()
        session.sequence += message.kind != Kind.HEARTBEAT
        session.sent += 1
        stamped = msgspec.structs.replace(message, number=session.sent, sent_ns=session.left_ns)
        session.sender.send(self._to_tensors(stamped), ready, functools.partial(self._lose, session, message.kind))

    def metrics(self, sessions: Iterable[SessionT]) -> Iterator[Metric]:
        """Yield the metrics of the messages under way."""
        counts = [one.send_queue.under_way(self._ledger.count(one.key, CONSUMED, self._to)) for one in sessions]
        yield Metric("omni_credits_used", sum(messages for messages, _ in counts))
        yield Metric("omni_pool_bytes", sum(size for _, size in counts))

    def _send_batches(self, session: SessionT, interval_ns: int) -> None:
        queue, wanted = session.send_queue, self._wanted_of(session)
        consumed = self._ledger.count(session.key, CONSUMED, self._to)
        while batch := queue.pop_batch(consumed, interval_ns=interval_ns, wanted=wanted):
            self.send_message(session, self._to_message(session, batch), batch.ready)

    def _wanted_of(self, session: SessionT) -> int | None:
        queue = session.send_queue
        return queue.start if queue.given < queue.start else self._wanted(session)

    def _lose(self, session: SessionT, kind: Kind) -> None:
        session.refused += 1
        self._when_refused(session, kind)


class _Copy(NamedTuple):
    """Items of one session that the next copy writes."""

    slot: int
    start: int
    tensor: Tensor
    ready: torch.cuda.Event | None


class RingWriter:
    """Writes items of open sessions into the next stage's ring: one kernel for all sessions, then a note in the ledger.

    All sessions share one doorbell. A step has news of every session, and a message for each would take both stages
    longer than the step.

    Args:
        ledger: of the stage that writes.
        to: the next stage.
        device: of the items.
    """

    def __init__(self, ledger: SessionLedger, to: StageName, device: torch.device) -> None:
        self._ledger, self._to, self._device = ledger, to, device
        self._ringer = DoorbellRinger(ledger.name, to)
        self._ring: Ring | None = None
        self._look_from_ns = 0
        self._failure = LastingFailure()
        self._copies: list[_Copy] = []
        self._notes: list[tuple[SessionKey, Placed]] = []

    def find_ring(self, now_ns: int) -> None:
        """Release the ring of a process that has ended, and open the ring of the next stage's present process."""
        if self._ring is not None and self._present_ring is None:
            self._leave_ring()
        if self._ring is not None or now_ns < self._look_from_ns:
            return
        self._look_from_ns = now_ns + LOOK_NS
        try:
            self._ring = open_ring(self._ledger.name, self._to, self._ledger.word(EPOCH, self._to), self._device)
        except (RingError, LedgerError, OSError) as error:
            if self._failure.begins(str(error)):
                logger.warning("what goes to %s takes Triton's messages, which are slower: %s", self._to, error)
            return
        if self._ring is not None and self._failure.ends():
            logger.warning("what goes to %s takes the ring now", self._to)

    def has_places(self, key: SessionKey) -> bool:
        """Return True if the session has places in a ring."""
        return self._ring is not None and key.slot < self._ring.slots

    @property
    def places(self) -> int:
        """Places of a session in the ring; 0 = there is no ring."""
        return 0 if self._ring is None else self._ring.places

    def room(self, key: SessionKey, placed: int) -> int:
        """Return how many items of the session still fit into its places, which have taken `placed` so far."""
        return self.places - (placed - self._ledger.count(key, FETCHED, self._to)) if self.has_places(key) else 0

    def carry(self, key: SessionKey, batch: RingBatch) -> None:
        """Take a session's items and note for the next `flush`."""
        if batch.tensor is not None:
            self._copies.append(_Copy(key.slot, batch.start, batch.tensor, batch.ready))
        if batch.announced:
            self._notes.append((key, Placed(batch.total, batch.by_message, time.monotonic_ns())))

    def flush(self) -> None:
        """Copy the queued items of all sessions at once, then notify the next stage.

        It waits for these copies, which run on a side stream beside the engine's next step. A thread of their own would
        compete with this one for the GIL.
        """
        copies, self._copies = self._copies, []
        notes, self._notes = self._notes, []
        ring = self._present_ring
        if ring is None:
            return
        if copies:
            self._copy(ring, copies)
        if notes:
            await_side_stream(self._device)
            for key, placed in notes:
                self._ledger.place(key, placed)
            self._ringer.ring()

    def close(self) -> None:
        """Stop writing."""
        self._leave_ring()
        self._ringer.close()

    @property
    def _present_ring(self) -> Ring | None:
        """The ring, unless its owner is gone: another process would look for items in a ring of its own."""
        ring = self._ring
        return ring if ring is not None and ring.epoch == self._ledger.word(EPOCH, self._to) else None

    def _copy(self, ring: Ring, copies: list[_Copy]) -> None:
        places: list[Tensor] = []
        tensors: list[Tensor] = []
        for one in copies:
            parts = ring.parts(one.slot, one.start, one.tensor.shape[0])
            places += parts
            tensors += [one.tensor] if len(parts) == 1 else torch.split(one.tensor, [len(part) for part in parts])
        with on_side_stream(self._device) as stream:
            # Items of one step share an event and the memory of that step's output.
            for ready in {id(one.ready): one.ready for one in copies if one.ready is not None}.values():
                ready.wait()
            torch._foreach_copy_(places, tensors)
            if stream is not None:
                for tensor in {one.tensor.untyped_storage().data_ptr(): one.tensor for one in copies}.values():
                    tensor.record_stream(stream)

    def _leave_ring(self) -> None:
        ring, self._ring = self._ring, None
        if ring is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        try:
            ring.close()
        except RingError as error:
            logger.warning("the ring of %s: %s", self._to, error)
