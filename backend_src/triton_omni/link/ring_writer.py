# SPDX-License-Identifier: Apache-2.0
"""How rows or codes get into the next stage's ring: those of all sessions by one kernel, then told in the ledger.

One bell for all of them: a step of an engine has news of every session, and a message for each would take both stages
longer than the step. It knows no engine and no Triton.
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
from triton_omni.link.ring import Ring, RingError, find_ring
from triton_omni.link.send_queue import SendQueue
from triton_omni.session.ledger import Placed, SessionLedger
from triton_omni.session.ledger_layout import LedgerError
from triton_omni.session.wire import SessionKey

LOOK_NS: Final = 500_000_000
"""How often a ring is looked for that is not offered, at most."""

logger = logging.getLogger(__name__)


class _Copy(NamedTuple):
    """What of one session is about to be copied."""

    slot: int
    start: int
    tensor: Tensor
    ready: torch.cuda.Event | None


class RingWriter:
    """Puts rows or codes of open sessions into the ring of the next stage. Of one thread.

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

    def look(self, now_ns: int) -> None:
        """Leave the ring of a process that is gone, and find that of the next stage's present one; to be called before
        anything of a session that began since is taken.
        """
        if self._ring is not None and self._present_ring is None:
            self._leave_ring()
        if self._ring is not None or now_ns < self._look_from_ns:
            return
        self._look_from_ns = now_ns + LOOK_NS
        try:
            self._ring = find_ring(self._ledger.name, self._to, self._ledger.epoch(self._to), self._device)
        except (RingError, LedgerError, OSError) as error:
            logger.warning("what goes to %s takes Triton's messages, which are slower: %s", self._to, error)

    @property
    def _present_ring(self) -> Ring | None:
        """The ring, unless its owner is gone: another process would look for what is placed in one of its own."""
        ring = self._ring
        return ring if ring is not None and ring.epoch == self._ledger.epoch(self._to) else None

    def has_places(self, key: SessionKey) -> bool:
        """Whether the session has places in a ring."""
        ring = self._ring
        return ring is not None and key.slot < ring.slots

    def room(self, key: SessionKey, send_queue: SendQueue) -> int:
        """How many more rows or codes of the session whose send queue it is may be placed."""
        ring = self._ring
        if ring is None or key.slot >= ring.slots:
            return 0
        return ring.places - (send_queue.placed - self._ledger.fetched(key, self._to))

    def is_half_full(self, count: int) -> bool:
        """Whether so many of a session take half of its places or more."""
        return self._ring is not None and 2 * count >= self._ring.places

    def take(self, key: SessionKey, send_queue: SendQueue) -> bool:
        """Have rows [N, H] or codes [N] that wait in a session's send queue be copied with the next `leave`, as many as
        there is room for; whether there are any."""
        start = send_queue.placed
        taken = (
            send_queue.take_tensor(self.room(key, send_queue)) if send_queue.held and send_queue.past_messages else None
        )
        if taken is not None:
            self._copies.append(_Copy(key.slot, start, *taken))
        return taken is not None

    def tell(self, key: SessionKey, send_queue: SendQueue) -> None:
        """Have the next stage be told with the next `leave` of all that was taken from the session's send queue."""
        self._told.append((key, Placed(send_queue.placed, send_queue.behind or 0, time.monotonic_ns())))

    def leave(self) -> None:
        """Copy what was placed, of all sessions at once, and tell the next stage.

        It waits for the copies of which it tells, which a stream of their own makes beside the engine's next step: a
        thread that did so would stand in line with this one for Python's lock.
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
        """Place nothing more."""
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
