# SPDX-License-Identifier: Apache-2.0
"""The load generator: requests on one event loop, at a fixed concurrency or at a fixed rate.

Errors of requests are written down and never end a run. Cancelling a run cuts its open requests off (the server is
told) and keeps their records. Knows the client only as something with `stream`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from triton_omni_client.errors import OmniClientError, Overloaded
from triton_omni_client.messages import Delta, Request, TextDelta

from .player import play
from .records import RecordBuilder, RequestRecord

Clock = Callable[[], float]


class Streamer(Protocol):
    """The part of a client that a load needs; `AsyncOmniClient` has it."""

    def stream(self, request: Request) -> AbstractAsyncContextManager[AsyncIterator[Delta]]:
        """Send a request; leaving the context early cancels it."""
        ...


class Progress(Protocol):
    """Receives the progress of a run."""

    def started(self) -> None:
        """A request was sent."""
        ...

    def ended(self, record: RequestRecord) -> None:
        """A request has ended."""
        ...


def _ignore(index: int, reply: str) -> None:
    pass


async def _nothing(index: int) -> None:
    pass


class LoadRun:
    """One run: sends requests and collects their records.

    Args:
        client: is asked.
        request: makes the request of a number.
        progress: told of each request.
        clock: monotonic seconds.
        answered: told of each request's number and the text of its whole reply.
        before: awaited by closed loops before the request of a number is sent, and not counted.
    """

    def __init__(
        self,
        client: Streamer,
        request: Callable[[int], Request],
        progress: Progress,
        *,
        clock: Clock = time.monotonic,
        answered: Callable[[int, str], None] = _ignore,
        before: Callable[[int], Awaitable[None]] = _nothing,
    ) -> None:
        self._client = client
        self._request = request
        self._progress = progress
        self._clock = clock
        self._answered = answered
        self._before = before
        self._begin = clock()
        self.records: list[RequestRecord] = []
        """In the order in which the requests ended."""

    async def closed_loop(
        self,
        concurrency: int,
        requests: int,
        warm_up: int,
        ramp_up_s: float = 0.0,
        *,
        listens: bool = False,
        turns: int = 1,
    ) -> None:
        """Keep `concurrency` requests open: the next is sent when one ends, or if it `listens` once it was heard.

        Places send their first request one after another, evenly over `ramp_up_s`. The first `warm_up` requests are
        marked as such. The measurement does not wait for them, so that requests stay spread over time instead of
        starting together. After `overloaded` a place waits for as long as the server asked, as a client would.
        A place sends `turns` requests of following numbers, a conversation, before it takes another number.
        """
        conversations = iter(range(0, warm_up + requests, turns))

        async def place(begin_s: float) -> None:
            await asyncio.sleep(begin_s - self._now())
            heard_s = 0.0
            for index in itertools.chain.from_iterable(range(first, first + turns) for first in conversations):
                # After the last one nobody waits: the run would measure an idle server.
                await asyncio.sleep(heard_s - self._now())
                await self._before(index)
                start_s = self._now()
                record, error = await self._measure(index, start_s, warm_up=index < warm_up)
                if isinstance(error, Overloaded) and error.retry_after_ms:
                    await asyncio.sleep(error.retry_after_ms / 1000)
                if listens:
                    heard_s = start_s + play(record.chunks).over_s

        async with asyncio.TaskGroup() as group:
            for number in range(concurrency):
                group.create_task(place(number * ramp_up_s / concurrency))

    async def crowds(self, size: int, requests: int, warm_up: int) -> None:
        """Send `size` requests at once, and the next as many when all of them have ended."""
        for first in range(0, warm_up + requests, size):
            now_s, last = self._now(), min(first + size, warm_up + requests)
            async with asyncio.TaskGroup() as group:
                for index in range(first, last):
                    group.create_task(self._measure(index, now_s, warm_up=index < warm_up))

    async def open_loop(self, arrivals: Iterable[float], requests: int, warm_up: int) -> None:
        """Start a request at each arrival, in seconds after the run's begin, however many are open.

        Latencies count from the arrival, so a late sender cannot hide what a user would have waited.
        """
        async with asyncio.TaskGroup() as group:
            for index, arrival in enumerate(itertools.islice(arrivals, warm_up + requests)):
                await asyncio.sleep(arrival - self._now())
                group.create_task(self._measure(index, arrival, warm_up=index < warm_up))

    async def _measure(
        self, index: int, start_s: float, *, warm_up: bool
    ) -> tuple[RequestRecord, OmniClientError | None]:
        """Send one request, take all its deltas and keep its record; returns that, and the error that ended it."""
        builder = RecordBuilder(index, start_s, self._now(), warm_up=warm_up)
        self._progress.started()
        failure, said = None, []
        try:
            async with self._client.stream(self._request(index)) as deltas:
                async for delta in deltas:
                    builder.add(delta, self._now())
                    if isinstance(delta, TextDelta):
                        said.append(delta.text)
            self._answered(index, "".join(said))
        except OmniClientError as error:
            failure = error
            builder.fail(error)
        except asyncio.CancelledError:
            builder.interrupt()
            raise
        finally:
            record = builder.build(self._now())
            self.records.append(record)
            self._progress.ended(record)
        return record, failure

    def _now(self) -> float:
        return self._clock() - self._begin


class LoopLag:
    """Watches how late the event loop is: what it adds to every time that was taken on it."""

    INTERVAL_S = 0.02

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LoopLag:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            due = time.monotonic() + self.INTERVAL_S
            await asyncio.sleep(self.INTERVAL_S)
            self.worst_s = max(self.worst_s, time.monotonic() - due)


async def run_until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do `work` until it ends or `stop` is set, which cancels it; whether it ended by itself."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()  # raises what went wrong
    return not task.cancelled()
