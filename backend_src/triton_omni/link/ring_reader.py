# SPDX-License-Identifier: Apache-2.0
"""Reads rows or codes from a stage's ring; the counterpart of `link/ring_writer.py`. It knows no engine and no
Triton.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from triton_omni.core.streams import record_event
from triton_omni.link.doorbell import Doorbell
from triton_omni.link.ring import Ring
from triton_omni.session.ledger import SessionLedger
from triton_omni.session.ledger_table import FETCHED, PLACED, STAGES
from triton_omni.session.wire import SessionKey


class News(NamedTuple):
    """Items of one session that were written since the last look."""

    parts: list[Tensor]
    """Rows [N, H] or codes [N] in their order, in the ring itself."""
    total: int
    """Total number of items written, these included."""
    sent_ns: int
    """When they were given away, and came, by the system-wide monotonic clock."""
    arrived_ns: int


class RingReader:
    """Takes what the stage before has placed in this stage's ring. Used by one thread; the doorbell alone has its own.

    Args:
        ledger: of the stage that reads.
        device: of the ring.
        heard: called on the bell's thread when there is something new.

    Raises:
        OSError: another process has the stage's bell.
    """

    def __init__(self, ledger: SessionLedger, ring: Ring, device: torch.device, heard: Callable[[], object]) -> None:
        self._ledger, self._ring, self._device, self._heard = ledger, ring, device, heard
        self._before = STAGES[STAGES.index(ledger.stage) - 1]
        self._rung_ns = 0
        self._copies: deque[tuple[torch.cuda.Event | None, Sequence[tuple[SessionKey, int]]]] = deque()
        """Sessions and item counts of copies that the device may not have finished."""
        self._doorbell = Doorbell(ledger.name, ledger.stage, self._hear)
        self.fetched_bytes = 0

    def news(self, key: SessionKey, fetched: int, by_message: int) -> News | None:
        """Return the items of a session after the first `fetched`; None = nothing new, or an earlier message is still
        missing.

        Args:
            by_message: rows or codes that came in messages.
        """
        if self._ledger.count(key, PLACED, self._before) == fetched:
            return None
        placed = self._ledger.placing(key, self._before)
        if placed.behind != by_message or placed.total <= fetched:
            return None
        parts = self._ring.parts(key.slot, fetched, placed.total - fetched)
        self.fetched_bytes += sum(part.nbytes for part in parts)
        # By this look, where it came before the bell was heard.
        arrived_ns = self._rung_ns if self._rung_ns >= placed.sent_ns else time.monotonic_ns()
        return News(parts, placed.total, placed.sent_ns, arrived_ns)

    def enqueued(self, fetched: Sequence[tuple[SessionKey, int]]) -> None:
        """All copies of so much of each session are enqueued on the current stream."""
        self._copies.append((record_event(self._device), fetched))

    def free(self) -> None:
        """Give the places back of which the device has made the copies."""
        while self._copies and (self._copies[0][0] is None or self._copies[0][0].query()):  # type: ignore[no-untyped-call]
            for key, total in self._copies.popleft()[1]:
                self._ledger.write(key, FETCHED, total)

    def hush(self) -> None:
        """Hear the bell no more."""
        self._doorbell.close()

    def close(self) -> None:
        """Leave the ring; nothing of it may be in use."""
        self._ring.close()

    def _hear(self) -> None:
        self._rung_ns = time.monotonic_ns()
        self._heard()
