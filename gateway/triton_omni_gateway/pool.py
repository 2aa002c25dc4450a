# SPDX-License-Identifier: Apache-2.0
"""The Triton servers of a gateway: each request goes to the ready one with the fewest open replies.

A reply needs one server from its beginning to its end, so what is balanced is requests. Those of one `cache_salt` have
a home, whose caches hold what was said before, and go there unless it is busier than the others by `HOME_LEAD` replies.
A request that has had no response yet may be moved to another server; what it had begun is cancelled or lost, and has
no effect but its cost.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from triton_omni_client import (
    NO_RETRY,
    AsyncOmniClient,
    AsyncStream,
    ConnectionFailed,
    Delta,
    Internal,
    OmniClientError,
    Overloaded,
    Reply,
    Request,
    Timings,
)
from triton_omni_client.catalog import ServedModel
from triton_omni_client.deltas import AsyncDeltaIterator

HOME_LEAD = 4
"""Open replies that a home may have more than the server with the fewest; a caller with more uses all servers."""
WATCH_S = 1.0
"""Between two looks at which servers are ready."""
ASK_S = 2.0
"""Seconds in which a server must answer whether it is ready; a slower one counts as not ready."""


@dataclass(eq=False)
class Server:
    """One Triton server."""

    url: str
    client: AsyncOmniClient
    ready: bool = True
    """Last known readiness; a new server counts as ready."""
    open: int = 0
    """Replies under way there, of this gateway."""
    turn: int = 0
    """When it was last chosen: among equals the one that waited longest is next."""

    def leave(self) -> None:
        """One reply less."""
        self.open -= 1


class PooledStream(AsyncDeltaIterator):
    """The deltas of one reply, of the first server that takes the request.

    Iterating raises an `OmniClientError` when no server does, or when the one that did fails.
    """

    def __init__(self, servers: Sequence[Server], request: Request, chosen: Callable[[Server], None]) -> None:
        self._request = request
        self._others = iter(servers)
        self._chosen = chosen
        self._connections = 0
        """How many broke before a response came."""
        self._answered = False
        self._ask(next(self._others))

    def _ask(self, server: Server) -> None:
        self._stream: AsyncStream = server.client.stream(self._request)
        self._server = server
        self._chosen(server)
        # Also of a stream that nobody closes: collecting it as garbage cancels its request.
        self._release = weakref.finalize(self, server.leave)

    async def __anext__(self) -> Delta:
        while True:
            try:
                delta = await anext(self._stream)
            except OmniClientError as error:
                self._release()
                if not self._may_move(error) or (server := next(self._others, None)) is None:
                    raise
                self._ask(server)
            except StopAsyncIteration:
                self._release()
                raise
            else:
                self._answered = True
                return delta

    def _may_move(self, error: OmniClientError) -> bool:
        """True if another server may take the request that this one refused.

        A request that ends servers must not go round: of broken connections it survives one.
        """
        if self._answered:
            return False
        if isinstance(error, ConnectionFailed):
            self._server.ready = False
            self._connections += 1
            return self._connections < 2
        # An error of Triton itself, without a stage: a model that is not loaded, or a server that stops.
        return isinstance(error, Overloaded) or (type(error) is Internal and error.by_triton and error.stage is None)

    def close(self) -> None:
        """Cancel the request unless it has ended; iteration stops after what has already arrived."""
        self._stream.close()
        self._release()

    def reply(self) -> Reply:
        """The reply so far."""
        return self._stream.reply()

    def timings(self) -> Timings:
        """Times since the server that answers was asked."""
        return self._stream.timings()


class ServerPool:
    """Connections to some servers, for any number of requests at once on one event loop.

    Args:
        urls: `HOST:PORT` of each server's gRPC endpoint.
        moved: called for each request that another server than the first is asked for.
        seen: called with the number of servers that are ready, after each look.
    """

    def __init__(
        self,
        urls: Sequence[str],
        moved: Callable[[], None] = lambda: None,
        seen: Callable[[int], None] = lambda _ready: None,
    ) -> None:
        self._urls = urls
        self._servers: list[Server] = []
        self._moved, self._seen = moved, seen
        self._turns = itertools.count(1)
        self._looking: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ServerPool]:
        """This pool, connected, its servers' readiness watched."""
        async with AsyncExitStack() as stack:
            self._servers.clear()
            for url in self._urls:
                client = await stack.enter_async_context(AsyncOmniClient(url, retry=NO_RETRY))
                self._servers.append(Server(url, client))
            watching = asyncio.create_task(self._watch())
            try:
                yield self
            finally:
                ending = [task for task in (watching, self._looking) if task is not None]
                for task in ending:
                    task.cancel()
                await asyncio.gather(*ending, return_exceptions=True)

    def stream(self, request: Request) -> PooledStream:
        """Send a request to its home or the server that has the fewest replies open, and on to others where it is not
        taken.

        Raises:
            BadRequest: the request cannot be expressed.
        """
        asked = itertools.count()

        def choose(server: Server) -> None:
            server.open += 1
            server.turn = next(self._turns)
            if next(asked):
                self._moved()

        return PooledStream(self._in_order(request.cache_salt), request, choose)

    async def ready(self) -> bool:
        """True if a server takes requests; concurrent callers share one check."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        await asyncio.shield(self._looking)
        return any(server.ready for server in self._servers)

    async def wait_ready(self, seconds: float) -> bool:
        """Ask again until a server is ready or `seconds` have passed; asks once when `seconds` is 0."""
        deadline = time.monotonic() + seconds
        while not await self.ready():
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(WATCH_S / 4)
        return True

    async def models(self) -> list[ServedModel]:
        """Models of the first server that answers.

        Raises:
            OmniClientError: none does.
        """
        failure: OmniClientError = ConnectionFailed("there is no server")
        for server in self._in_order():
            try:
                return await server.client.models(timeout=ASK_S)
            except OmniClientError as error:
                failure = error
        raise failure

    def _in_order(self, salt: str | None = None) -> list[Server]:
        """Ready servers first: none is left out, since what was seen of it may have passed."""
        home = None if salt is None else max(self._servers, key=functools.partial(_weight, salt), default=None)

        def order(server: Server) -> tuple[bool, int, bool, int]:
            at_home = server is home
            return not server.ready, server.open - HOME_LEAD * at_home, not at_home, server.turn

        return sorted(self._servers, key=order)

    async def _watch(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(WATCH_S)

    async def _look(self) -> None:
        asked = [server.client.ready(timeout=ASK_S) for server in self._servers]
        for server, ready in zip(self._servers, await asyncio.gather(*asked), strict=True):
            server.ready = ready
        self._seen(sum(server.ready for server in self._servers))


def _weight(salt: str, server: Server) -> bytes:
    """Rendezvous hashing: a server that goes or comes moves the requests of its own salts alone."""
    return hashlib.sha256(f"{salt} {server.url}".encode()).digest()
