# SPDX-License-Identifier: Apache-2.0
"""The blocking client over gRPC streams: one call a request, so many may run at once on one client.

A thin shell over `messages.py` and `protocol.py`; its twin is `aio.py`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2, service_pb2_grpc  # type: ignore[import-untyped]

from .address import DEFAULT_URL, grpc_address
from .catalog import KNOWN, ServedModel, config_of, index_of, served_model
from .closing import Closing
from .deltas import DeltaIterator
from .errors import OmniClientError, Overloaded
from .messages import MODEL, Delta, Media, Request
from .protocol import LONGEST_WAIT_S, MAX_MESSAGE_BYTES, StreamReader, channel_options, from_grpc, to_grpc
from .reply import Reply, ReplyBuilder, Timings
from .retry import DEFAULT_RETRY, NO_RETRY, Retry
from .settling import cancel_late, settle
from .shared_media import SharedMedia, shared_part

DEFAULT_TIMEOUT = 150.0
"""Seconds until the client gives up on a request without a timeout of its own: above the server's default of 120."""
READY_TIMEOUT = 5.0
"""Seconds that a question whether the server is ready may take."""
POLL_SECONDS = 0.2
"""Between two questions whether the server is ready."""


Connect = Callable[[float], Any]
"""Opens the call of a request, given the seconds that are left for it."""


class Call(Protocol):
    """One attempt at a request, by whatever protocol."""

    def receive(self) -> Any:
        """The next response as the stream's reader takes it; None after the last.

        Raises:
            OmniClientError: the call was refused, broke or took too long.
        """

    def cancel(self) -> None:
        """Give it up, from any thread; a `receive` that waits ends."""


class _GrpcCall:
    """A `Call` of gRPC."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def receive(self) -> Any:
        try:
            response = next(self._call, None)
        except grpc.RpcError as error:
            raise from_grpc(error) from error
        if response is not None and response.error_message:
            settle(self._call)
        return response

    def cancel(self) -> None:
        self._call.cancel()


class Stream(DeltaIterator):
    """The deltas of one reply as they come; closing it before its end cancels the request on the server.

    Iterating raises the server's error as an `OmniClientError`. A refusal for want of room is waited out
    as `retry` says, but never once a response has come. `close` may be called from any thread.
    """

    def __init__(
        self,
        connect: Callable[[float], Call],
        reader: StreamReader,
        timeout: float,
        retry: Retry = NO_RETRY,
        shared: SharedMedia | None = None,
    ) -> None:
        self._connect = connect
        # Called once, when the request has ended; or when nobody holds this stream any more, or at the process's end.
        self._release = (lambda: None) if shared is None else weakref.finalize(self, shared.release)
        self._deadline = time.monotonic() + timeout
        self._reader = reader
        self._builder = ReplyBuilder()
        self._pending: deque[Delta] = deque()
        self._answered = False
        self._gone = threading.Event()
        self._late: threading.Timer | None = None
        self._retry = retry
        self._call: Call | None = None
        self._call = connect(timeout)

    def __next__(self) -> Delta:
        while not self._pending:
            if self._gone.is_set():
                raise StopIteration
            self._receive()
        delta = self._pending.popleft()
        self._builder.add(delta)
        return delta

    def _receive(self) -> None:
        try:
            if self._answered:
                self._receive_once()
            else:
                self._retry.blocking(self._deadline - time.monotonic(), self._gone)(self._receive_once)
        except OmniClientError:
            self.close()
            raise

    def _receive_once(self) -> None:
        """Take one response, of a new call where the last one was refused."""
        if self._gone.is_set():
            return
        if self._call is None:
            self._call = self._connect(max(0.0, self._deadline - time.monotonic()))
            if self._gone.is_set():  # `close` came in between and saw no call
                self._call.cancel()
        try:
            self._receive_from(self._call)
        except Overloaded:
            self._call.cancel()
            self._call = None
            raise

    def _receive_from(self, call: Call) -> None:
        try:
            response = call.receive()
        except OmniClientError:
            # After our own cancel, or with nothing that could still be missing, it means no harm.
            if not (self._gone.is_set() or self._reader.whole):
                raise
            response = None
        if response is not None:
            self._pending.extend(self._reader.feed(response))
            self._answered = True
            if self._reader.whole and self._late is None:
                self._late = cancel_late(call)
        elif not self._gone.is_set():
            self._end()
            self._release()
            self._reader.end()

    def _end(self) -> None:
        self._gone.set()
        if self._late is not None:
            self._late.cancel()
        self._builder.end()

    def close(self) -> None:
        """Cancel the request unless it has ended; iteration stops after what has already arrived."""
        if not self._gone.is_set():
            self._end()
            if self._call is not None:
                self._call.cancel()
            self._release()

    def __del__(self) -> None:
        # Else the call would outlast the finalizer, which waits for the server to let go of what it uses.
        self.close()

    def timings(self) -> Timings:
        """Times as the client saw them, of the deltas taken so far; waits for room included."""
        return self._builder.timings()

    def reply(self) -> Reply:
        """The reply so far; the rest is neither waited for nor cancelled."""
        return self._builder.reply()


def wait_until(ready: Callable[[], bool], seconds: float) -> bool:
    """Call `ready` until it is true or `seconds` have passed; at least once."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def not_ready(server: bool, model: bool, name: str) -> str | None:
    """Return a sentence about the missing part of a server that answers; None where nothing is missing."""
    if not server:
        return "the server says that it is not ready"
    return None if model else f"the server has no model {name!r}, or has not loaded it"


class OmniClient(Closing):
    """A connection to a server, for any number of requests at once and from any thread.

    Args:
        url: host and port of Triton's gRPC endpoint.
        model: the streaming model.
        timeout: seconds for a request that names none.
        max_message_bytes: largest gRPC message sent or taken.
        credentials: TLS credentials of `grpc.ssl_channel_credentials`; None is plain text.
        retry: how a refusal for want of room is waited out; `NO_RETRY` raises it at once.
        shared_memory: whether media travel in system shared memory, for a server on this machine that sees its
            `/dev/shm`; released with each request, however it ends.

    Raises:
        BadRequest: `url` is no address of gRPC.
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
        self._shared_memory = shared_memory
        self._sharing: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._timeout = timeout
        self._retry = retry
        self._channel = (
            grpc.insecure_channel(url, options=options)
            if credentials is None
            else grpc.secure_channel(url, credentials, options=options)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(self, request: Request, *, retry: Retry | None = None) -> Stream:
        """Send a request; its deltas come by iterating over the result.

        Args:
            request: what to ask.
            retry: how a refusal for want of room is waited out; None is the client's own.

        Raises:
            BadRequest: the request cannot be expressed.
            OmniClientError: its media were to be shared, and the server does not take shared memory.
        """
        shared = self._share(request)
        message = to_grpc(request, self._model, {} if shared is None else {"media": shared})
        timeout = self._timeout if request.timeout is None else request.timeout
        stream = Stream(partial(self._call, message), StreamReader(request), timeout, retry or self._retry, shared)
        if shared is not None:
            self._sharing.add(stream)
        return stream

    def _share(self, request: Request) -> SharedMedia | None:
        media = shared_part(request) if self._shared_memory else None
        return None if media is None else SharedMedia(self._stub, media)

    def _call(self, message: Any, timeout: float) -> Call:
        return _GrpcCall(self._stub.ModelStreamInfer(iter([message]), timeout=min(timeout, LONGEST_WAIT_S)))

    def say(self, text: str = "", media: Sequence[Media] = (), **options: Any) -> Reply:
        """Ask and wait for the whole reply.

        Args:
            text: what the user says.
            media: what the user shows or plays, before the text.
            options: the other fields of `Request`.

        Raises:
            OmniClientError: the request was refused or failed.
        """
        return self.stream(Request.ask(text, media, **options)).collect()

    def ready(self, timeout: float = READY_TIMEOUT) -> bool:
        """True if the server and the model take requests; False where no server can be reached."""
        return self.obstacle(timeout) is None

    def obstacle(self, timeout: float = READY_TIMEOUT) -> str | None:
        """Why the server or the model takes no requests; None where both do."""
        try:
            server = self._stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=timeout)
            model = self._stub.ModelReady(service_pb2.ModelReadyRequest(name=self._model), timeout=timeout)
        except grpc.RpcError as error:
            return from_grpc(error).message
        return not_ready(server.ready, model.ready, self._model)

    def wait_ready(self, seconds: float) -> bool:
        """Ask again until the server is ready or `seconds` have passed; asks once when `seconds` is 0."""
        return wait_until(self.ready, seconds)

    def models(self, timeout: float = READY_TIMEOUT) -> list[ServedModel]:
        """Models that the server serves; the public ones where the server hides its index.

        Raises:
            OmniClientError: the server could not be asked.
        """
        try:
            entries = index_of(self._stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(), timeout=timeout))
        except grpc.RpcError:
            entries = [entry for entry in KNOWN if self._config(entry, timeout, needed=True)]
        return [served_model(entry, self._config(entry, timeout)) for entry in entries]

    def _config(self, entry: Mapping[str, Any], timeout: float, *, needed: bool = False) -> Mapping[str, Any] | None:
        try:
            request = service_pb2.ModelConfigRequest(name=entry["name"])
            return config_of(self._stub.ModelConfig(request, timeout=timeout))
        except grpc.RpcError as error:
            if needed:
                raise from_grpc(error) from error
            return None  # a model that is not loaded has none

    def close(self) -> None:
        """Close the connection; requests still running are cancelled."""
        for stream in list(self._sharing):
            stream.close()  # while the server can still be told to let go of its memory
        self._channel.close()
