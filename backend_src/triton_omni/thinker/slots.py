# SPDX-License-Identifier: Apache-2.0
"""The thinker's slots of the session ledger: one for each session, until every stage has closed it."""

from __future__ import annotations

import threading

from triton_omni.session.ledger import SessionLedger
from triton_omni.session.ledger_table import CAPACITY
from triton_omni.session.wire import SessionKey


class Slots:
    """The thinker's slots. Thread-safe: requests arrive on Triton's threads, sessions end on the loop's.

    A slot is taken until every stage has closed its session, which is some moments after the client got its last
    response and may ask again. So there are twice as many slots as sessions, and only those sessions count that are
    being served: an answered one holds no place in an engine, and no tensor.
    """

    def __init__(self, ledger: SessionLedger, max_sessions: int) -> None:
        self._ledger = ledger
        self._limit = max_sessions
        self._lock = threading.Lock()
        self._slots = min(2 * max_sessions, CAPACITY)
        self._free = list(range(self._slots))[::-1]
        self._serving: dict[int, SessionKey] = {}

    def allocate(self) -> SessionKey | None:
        """Begin a session, or None when as many as may be are being served."""
        with self._lock:
            if self._is_full() or not self._free:
                return None
            key = self._ledger.publish(self._free.pop())
            self._serving[key.slot] = key
            return key

    def answer(self, key: SessionKey) -> None:
        """The client is about to get its last response from the thinker; those of token2wav are in the ledger."""
        with self._lock:
            self._serving.pop(key.slot, None)

    def release(self, key: SessionKey) -> None:
        """Give the slot back; every stage has closed the session."""
        with self._lock:
            self._serving.pop(key.slot, None)
            self._free.append(key.slot)

    def _is_full(self) -> bool:
        if len(self._serving) >= self._limit:
            self._serving = {slot: key for slot, key in self._serving.items() if self._ledger.is_served(key)}
        return len(self._serving) >= self._limit

    @property
    def taken(self) -> set[int]:
        """Slots whose sessions not every stage has closed."""
        with self._lock:
            return set(range(self._slots)).difference(self._free)
