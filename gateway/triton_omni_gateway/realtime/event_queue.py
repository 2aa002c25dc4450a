# SPDX-License-Identifier: Apache-2.0
"""Events on their way to a client: put in order without waiting, sent as fast as the client takes them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from .config import Json
from .events import written
from .limits import RealtimeLimits


class EventQueue:
    """A queue of events.

    Whoever makes many waits for `room` first, so that what a slow client has not taken is bounded.

    Args:
        send: gives a text to the connection, and waits while that is full.
        seconds: in which the client has to take each event.
        limits: how much may be unsent before there is no room.
    """

    def __init__(self, send: Callable[[str], Awaitable[None]], seconds: float, limits: RealtimeLimits) -> None:
        self._send = send
        self._seconds = seconds
        self._limits = limits
        self._events: deque[str] = deque()
        self._size = 0
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()

    def put(self, event: Json) -> None:
        """Add an event; never waits."""
        text = written(event)
        self._events.append(text)
        self._size += len(text)
        self._changed.set()

    async def room(self, *, of_client: bool = False) -> None:
        """Wait until little is unsent.

        Args:
            of_client: wait for an event of the client, which has as much room again: replies that fill theirs must not
                keep an interruption from being heard.
        """
        limits, share = self._limits, 2 if of_client else 1
        while (
            len(self._events) >= share * limits.max_unsent_events or self._size >= share * limits.max_unsent_characters
        ):
            self._taken.clear()
            await self._taken.wait()

    async def run(self) -> None:
        """Send what is put, until cancelled.

        Raises:
            TimeoutError: the client took nothing for too long.
        """
        while True:
            await self._changed.wait()
            while self._events:
                async with asyncio.timeout(self._seconds):
                    await self._send(self._events[0])
                self._size -= len(self._events.popleft())
                self._taken.set()
            self._changed.clear()
