# SPDX-License-Identifier: Apache-2.0
"""The asyncio client over gRPC streams: the twin of `client.py`, with `async` and `await`.

A thin shell over `messages.py` and `protocol.py`. Cancelling a task while it waits for a delta cancels
the request on the server; elsewhere `async with` or `close` does.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2, service_pb2_grpc  # type: ignore[import-untyped]

from .client import DEFAULT_TIMEOUT, DEFAULT_URL, POLL_SECONDS, READY_TIMEOUT
from .errors import Cancelled, OmniClientError
from .messages import MODEL, Delta, Media, Request
from .protocol import MAX_MESSAGE_BYTES, StreamReader, channel_options, from_grpc, to_grpc
from .reply import Reply, ReplyBuilder, Timings


class AsyncStream(AsyncIterator[Delta]):
    """The deltas of one reply as they come; closing it before its end cancels the request on the server.

    Iterating raises the server's error as an `OmniClientError`.
    """

    def __init__(self, call: Any, request: Request) -> None:
        self._call = call
        self._reader = StreamReader(request)
        self._builder = ReplyBuilder()
        self._pending: deque[Delta] = deque()
        self._closed = False

    async def __anext__(self) -> Delta:
        while not self._pending:
            if self._closed:
                raise StopAsyncIteration
            await self._receive()
        delta = self._pending.popleft()
        self._builder.add(delta)
        return delta

    async def _receive(self) -> None:
        try:
            response = await self._call.read()
            if response is grpc.aio.EOF:
                self._end()
                self._reader.end()
            else:
                self._pending.extend(self._reader.feed(response))
        except grpc.RpcError as error:
            self._fail(from_grpc(error))
        except asyncio.CancelledError:
            if _task_is_being_cancelled():
                self.close()
                raise
            # The call was cancelled, not the task: gRPC raises the same error for both.
            self._fail(Cancelled(await self._call.details() or "the call was cancelled"))
        except OmniClientError:
            self.close()
            raise

    def _fail(self, error: OmniClientError) -> None:
        expected = self._closed or self._reader.final  # our own cancel, or nothing that could still be missing
        self._end()
        if not expected:
            raise error

    def _end(self) -> None:
        self._closed = True
        self._builder.end()

    def close(self) -> None:
        """Cancel the request unless it has ended; iteration stops after what has already arrived."""
        if not self._closed:
            self._end()
            self._call.cancel()

    def timings(self) -> Timings:
        """Times as the client saw them, of the deltas taken so far."""
        return self._builder.timings()

    def reply(self) -> Reply:
        """What was taken so far; the rest is neither waited for nor cancelled."""
        return self._builder.reply()

    async def collect(self) -> Reply:
        """Take all that is still to come and return the whole reply.

        Raises:
            OmniClientError: the server's error.
        """
        async with self:
            async for _ in self:
                pass
        return self.reply()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _task_is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class AsyncOmniClient:
    """A connection to a server, for any number of requests at once on one event loop.

    Takes the arguments of `OmniClient`; to be made where the loop is running.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        model: str = MODEL,
        timeout: float = DEFAULT_TIMEOUT,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        options = channel_options(max_message_bytes)
        self._model = model
        self._timeout = timeout
        self._channel = (
            grpc.aio.insecure_channel(url, options=options)
            if credentials is None
            else grpc.aio.secure_channel(url, credentials, options=options)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(self, request: Request) -> AsyncStream:
        """Send a request; its deltas come by iterating over the result.

        Raises:
            BadRequest: the request cannot be expressed.
        """
        message = to_grpc(request, self._model)
        timeout = self._timeout if request.timeout is None else request.timeout
        return AsyncStream(self._stub.ModelStreamInfer(iter([message]), timeout=timeout), request)

    async def say(self, text: str = "", media: Sequence[Media] = (), **options: Any) -> Reply:
        """Ask and wait for the whole reply; cancelling the task cancels the request. Arguments of `OmniClient.say`.

        Raises:
            OmniClientError: the request was refused or failed.
        """
        return await self.stream(Request.ask(text, media, **options)).collect()

    async def ready(self, timeout: float = READY_TIMEOUT) -> bool:
        """Whether the server and the model take requests; a server that cannot be reached is not ready."""
        try:
            server = await self._stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=timeout)
            model = await self._stub.ModelReady(service_pb2.ModelReadyRequest(name=self._model), timeout=timeout)
        except grpc.RpcError:
            return False
        return bool(server.ready and model.ready)

    async def wait_ready(self, seconds: float) -> bool:
        """Ask again until the server is ready or `seconds` have passed; asks once when `seconds` is 0."""
        deadline = time.monotonic() + seconds
        while not await self.ready():
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    async def close(self) -> None:
        """Close the connection; requests still running are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
