# SPDX-License-Identifier: Apache-2.0
"""Writes rows or codes into the next stage's ring: one kernel for all sessions, then a note in the ledger.

All sessions share one doorbell. A step has news of every session, and a message for each would take both stages longer
than the step. It knows no engine and no Triton.
"""

from __future__ import annotations

import logging
import time
from typing import Final, NamedTuple

import torch
from torch import Tensor

from triton_omni.core.errors import StageName
from triton_omni.core.streams import await_side_stream, on_side_stream
from triton_omni.link.doorbell import DoorbellRinger
from triton_omni.link.ring import Ring, RingError, open_ring
from triton_omni.link.send_queue import SendQueue
from triton_omni.session.ledger import Placed, SessionLedger
from triton_omni.session.ledger_table import EPOCH, FETCHED
from triton_omni.session.server_folder import LedgerError
from triton_omni.session.wire import SessionKey

LOOK_NS: Final = 500_000_000
"""Minimum nanoseconds between two searches for a ring that is not offered yet."""

logger = logging.getLogger(__name__)


class _Copy(NamedTuple):
    """Rows or codes of one session that the next copy writes."""

    slot: int
    start: int
    tensor: Tensor
    ready: torch.cuda.Event | None


class RingWriter:
    """Writes rows or codes of open sessions into the next stage's ring. Used by one thread.

    Args:
        ledger: of the stage that places.
        to: the next stage.
        device: on which rows or codes are.
    """

    def __init__(self, ledger: SessionLedger, to: StageName, device: torch.device) -> None:
        self._ledger, self._to, self._device = ledger, to, device
        self._ringer = DoorbellRinger(ledger.name, to)
        self._ring: Ring | None = None
        self._look_from_ns = 0
        self._copies: list[_Copy] = []
        self._told: list[tuple[SessionKey, Placed]] = []

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
            logger.warning("what goes to %s takes Triton's messages, which are slower: %s", self._to, error)

    @property
    def _present_ring(self) -> Ring | None:
        """The ring, unless its owner is gone: another process would look for what is placed in one of its own."""
        ring = self._ring
        return ring if ring is not None and ring.epoch == self._ledger.word(EPOCH, self._to) else None

    def has_places(self, key: SessionKey) -> bool:
        """True if the session has places in a ring."""
        ring = self._ring
        return ring is not None and key.slot < ring.slots

    def room(self, key: SessionKey, send_queue: SendQueue) -> int:
        """Number of rows or codes of the session that still fit into its places."""
        ring = self._ring
        if ring is None or key.slot >= ring.slots:
            return 0
        return ring.places - (send_queue.placed - self._ledger.count(key, FETCHED, self._to))

    def is_half_full(self, count: int) -> bool:
        """True if `count` items fill at least half of a session's places."""
        return self._ring is not None and 2 * count >= self._ring.places

    def queue_copy(self, key: SessionKey, send_queue: SendQueue) -> bool:
        """Queue rows [N, H] or codes [N] of a session for the next `leave`, as many as fit; return True if there are
        any.
        """
        start = send_queue.placed
        taken = (
            send_queue.take_tensor(self.room(key, send_queue)) if send_queue.held and send_queue.past_messages else None
        )
        if taken is not None:
            self._copies.append(_Copy(key.slot, start, *taken))
        return taken is not None

    def queue_note(self, key: SessionKey, send_queue: SendQueue) -> None:
        """Queue a note to the next stage about all rows or codes taken so far; the next `leave` sends it."""
        self._told.append((key, Placed(send_queue.placed, send_queue.behind or 0, time.monotonic_ns())))

    def flush(self) -> None:
        """Copy the queued rows or codes of all sessions at once, then notify the next stage.

        It waits for these copies, which run on a side stream beside the engine's next step. A thread of their own would
        compete with this one for the GIL.
        """
        copies, self._copies = self._copies, []
        told, self._told = self._told, []
        ring = self._present_ring
        if ring is None:
            return
        if copies:
            self._copy(ring, copies)
        if told:
            await_side_stream(self._device)
            for key, placed in told:
                self._ledger.place(key, placed)
            self._ringer.ring()

    def close(self) -> None:
        """Stop writing."""
        self._leave_ring()
        self._ringer.close()

    def _copy(self, ring: Ring, copies: list[_Copy]) -> None:
        places: list[Tensor] = []
        tensors: list[Tensor] = []
        for one in copies:
            parts = ring.parts(one.slot, one.start, one.tensor.shape[0])
            places += parts
            tensors += [one.tensor] if len(parts) == 1 else torch.split(one.tensor, [len(part) for part in parts])
        with on_side_stream(self._device) as stream:
            # Those of one step share an event, and the memory of what it gave.
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
