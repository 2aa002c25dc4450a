# SPDX-License-Identifier: Apache-2.0
"""The asyncio client over gRPC streams: the twin of `client.py`, with `async` and `await`.

A thin shell over `messages.py` and `protocol.py`. Cancelling a task while it waits for a delta cancels
the request on the server; elsewhere `async with` or `close` does.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2, service_pb2_grpc  # type: ignore[import-untyped]

from .address import DEFAULT_URL, grpc_address
from .catalog import KNOWN, ServedModel, config_of, index_of, served_model
from .client import DEFAULT_TIMEOUT, POLL_SECONDS, READY_TIMEOUT, Connect, not_ready
from .deltas import AsyncDeltaIterator
from .errors import Cancelled, OmniClientError, Overloaded
from .messages import MODEL, Delta, Media, Request
from .protocol import LONGEST_WAIT_S, MAX_MESSAGE_BYTES, StreamReader, channel_options, from_grpc, to_grpc
from .reply import Reply, ReplyBuilder, Timings
from .retry import DEFAULT_RETRY, NO_RETRY, Retry
from .settling import read_end, settle_async
from .shared_async import AsyncSharedMedia, Sharing
from .shared_media import shared_part


class AsyncStream(AsyncDeltaIterator):
    """The deltas of one reply as they come; closing it before its end cancels the request on the server.

    Iterating raises the server's error as an `OmniClientError`. A refusal for want of room is waited out
    as `retry` says, but never once a response has come.
    """

    def __init__(
        self,
        connect: Connect,
        request: Request,
        timeout: float,
        retry: Retry = NO_RETRY,
        shared: AsyncSharedMedia | None = None,
    ) -> None:
        self._connect = connect
        self._shared = shared
        if shared is not None:
            weakref.finalize(self, shared.forget)
        self._deadline = time.monotonic() + timeout
        self._call: Any = connect(timeout)
        self._reader = StreamReader(request)
        self._builder = ReplyBuilder()
        self._pending: deque[Delta] = deque()
        self._answered = False
        self._gone = asyncio.Event()
        self._retry = retry

    async def __anext__(self) -> Delta:
        while not self._pending:
            if self._gone.is_set():
                raise StopAsyncIteration
            await self._receive()
        delta = self._pending.popleft()
        self._builder.add(delta)
        return delta

    async def _receive(self) -> None:
        try:
            if self._answered:
                await self._receive_once()
            else:
                await self._retry.awaiting(self._deadline - time.monotonic(), self._gone)(self._receive_once)
        except (OmniClientError, asyncio.CancelledError):
            self.close()
            raise

    async def _receive_once(self) -> None:
        """Take one response, of a new call where the last one was refused."""
        if self._gone.is_set():
            return
        if self._call is None:
            self._call = self._connect(max(0.0, self._deadline - time.monotonic()))
        try:
            if self._shared is not None and not self._answered:
                await self._shared.made()
            await self._receive_from(self._call)
        except Overloaded:
            self._call.cancel()
            self._call = None
            raise

    async def _receive_from(self, call: Any) -> None:
        try:
            response = await (read_end(call) if self._reader.whole else call.read())
        except grpc.RpcError as error:
            self._fail(from_grpc(error))
            response = grpc.aio.EOF
        except asyncio.CancelledError:
            if _task_is_being_cancelled():
                raise
            # The call was cancelled, not the task: gRPC raises the same error for both.
            self._fail(Cancelled(await call.details() or "the call was cancelled"))
            response = grpc.aio.EOF
        if response is not grpc.aio.EOF:
            if response.error_message:
                await settle_async(call)
            self._pending.extend(self._reader.feed(response))
            self._answered = True
        elif not self._gone.is_set():
            self._end()
            if self._shared is not None:
                await self._shared.released()
            self._reader.end()

    def _fail(self, error: OmniClientError) -> None:
        # After our own cancel, or with nothing that could still be missing, it means no harm.
        if not (self._gone.is_set() or self._reader.whole):
            raise error

    def _end(self) -> None:
        self._gone.set()
        self._builder.end()

    def close(self) -> None:
        """Cancel the request unless it has ended; iteration stops after what has already arrived."""
        if not self._gone.is_set():
            self._end()
            if self._call is not None:
                self._call.cancel()
            if self._shared is not None:
                self._shared.release()

    def timings(self) -> Timings:
        """Times as the client saw them, of the deltas taken so far; waits for room included."""
        return self._builder.timings()

    def reply(self) -> Reply:
        """The reply so far; the rest is neither waited for nor cancelled."""
        return self._builder.reply()


async def _message_later(request: Request, model: str, shared: AsyncSharedMedia) -> AsyncIterator[Any]:
    yield to_grpc(request, model, {"media": await shared.made()})


def _task_is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class AsyncOmniClient:
    """A connection to a server, for any number of requests at once on one event loop.

    Takes the arguments of `OmniClient`; to be made where the loop is running. Shared media are copied and given back by
    threads, over a connection of their own.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        model: str = MODEL,
        timeout: float = DEFAULT_TIMEOUT,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        credentials: grpc.ChannelCredentials | None = None,
        retry: Retry = DEFAULT_RETRY,
        shared_memory: bool = False,
    ) -> None:
        options, url = channel_options(max_message_bytes), grpc_address(url)
        self._model = model
        self._sharing = Sharing(url, credentials) if shared_memory else None
        self._streams_sharing: weakref.WeakSet[AsyncStream] = weakref.WeakSet()
        self._timeout = timeout
        self._retry = retry
        self._channel = (
            grpc.aio.insecure_channel(url, options=options)
            if credentials is None
            else grpc.aio.secure_channel(url, credentials, options=options)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(self, request: Request, *, retry: Retry | None = None) -> AsyncStream:
        """Send a request; its deltas come by iterating over the result, and so does what is wrong with shared memory.

        Args:
            request: what to ask.
            retry: how a refusal for want of room is waited out; None is the client's own.

        Raises:
            BadRequest: the request cannot be expressed.
        """
        media = None if self._sharing is None else shared_part(request)
        shared = None if self._sharing is None or media is None else self._sharing.begin(media)
        timeout = self._timeout if request.timeout is None else request.timeout
        stream = AsyncStream(
            partial(self._call, self._messages(request, shared)), request, timeout, retry or self._retry, shared
        )
        if shared is not None:
            self._streams_sharing.add(stream)
        return stream

    def _messages(self, request: Request, shared: AsyncSharedMedia | None) -> Callable[[], Any]:
        """Gives the one message of a call, for each call anew."""
        if shared is not None:
            return partial(_message_later, request, self._model, shared)
        message = to_grpc(request, self._model)
        return lambda: iter([message])

    def _call(self, messages: Callable[[], Any], timeout: float) -> Any:
        return self._stub.ModelStreamInfer(messages(), timeout=min(timeout, LONGEST_WAIT_S))

    async def say(self, text: str = "", media: Sequence[Media] = (), **options: Any) -> Reply:
        """Ask and wait for the whole reply; cancelling the task cancels the request. Arguments of `OmniClient.say`.

        Raises:
            OmniClientError: the request was refused or failed.
        """
        return await self.stream(Request.ask(text, media, **options)).collect()

    async def ready(self, timeout: float = READY_TIMEOUT) -> bool:
        """True if the server and the model take requests; False where no server can be reached."""
        return await self.obstacle(timeout) is None

    async def obstacle(self, timeout: float = READY_TIMEOUT) -> str | None:
        """Why the server or the model takes no requests; None where both do."""
        try:
            server = await self._stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=timeout)
            model = await self._stub.ModelReady(service_pb2.ModelReadyRequest(name=self._model), timeout=timeout)
        except grpc.RpcError as error:
            return from_grpc(error).message
        return not_ready(server.ready, model.ready, self._model)

    async def wait_ready(self, seconds: float) -> bool:
        """Ask again until the server is ready or `seconds` have passed; asks once when `seconds` is 0."""
        deadline = time.monotonic() + seconds
        while not await self.ready():
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    async def models(self, timeout: float = READY_TIMEOUT) -> list[ServedModel]:
        """Models that the server serves; the public ones where the server hides its index.

        Raises:
            OmniClientError: the server could not be asked.
        """
        try:
            entries = index_of(await self._stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(), timeout=timeout))
        except grpc.RpcError:
            entries = [entry for entry in KNOWN if await self._config(entry, timeout, needed=True)]
        return [served_model(entry, await self._config(entry, timeout)) for entry in entries]

    async def _config(
        self, entry: Mapping[str, Any], timeout: float, *, needed: bool = False
    ) -> Mapping[str, Any] | None:
        try:
            request = service_pb2.ModelConfigRequest(name=entry["name"])
            return config_of(await self._stub.ModelConfig(request, timeout=timeout))
        except grpc.RpcError as error:
            if needed:
                raise from_grpc(error) from error
            return None  # a model that is not loaded has none

    async def close(self) -> None:
        """Close the connection; requests still running are cancelled."""
        for stream in list(self._streams_sharing):
            stream.close()
        if self._sharing is not None:
            await self._sharing.close()
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
