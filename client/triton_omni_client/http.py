# SPDX-License-Identifier: Apache-2.0
"""The client over HTTP: a reply in one answer of `qwen2_5_omni_unary/infer`, or as events of `generate_stream`.

A thin shell over `messages.py` and `protocol.py`. One answer cannot be cancelled: a request whose caller went
away runs on at the server until it ends or its timeout passes. A stream's closed connection ends its request.
"""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from typing import Any
from urllib.parse import quote

from .address import DEFAULT_HTTP_URL, http_url
from .catalog import KNOWN, ServedModel, entries_of, served_model
from .client import DEFAULT_TIMEOUT, READY_TIMEOUT, Stream, not_ready, wait_until
from .errors import ConnectionFailed, Internal, Timeout
from .http_call import EventCall, answer_until, content, typed_errors
from .messages import MODEL, UNARY_MODEL, Delta, Media, Request
from .parsing import parsed
from .protocol import LONGEST_WAIT_S, EventReader, from_http, to_generate, to_http
from .reply import Reply, ReplyBuilder
from .retry import DEFAULT_RETRY, Retry

PIECE_BYTES = 1 << 18
"""Bytes of a request's body between two reports of progress."""

OnSent = Callable[[int, int], None]
_Answer = tuple[int, dict[str, str], bytes]


class HttpClient:
    """Whole replies and streams over HTTP; a connection a request, so any number of threads may use one client.

    Args:
        url: Triton's HTTP endpoint, `http://` or `https://`.
        model: the unary model.
        stream_model: the streaming one.
        timeout: seconds until a request that names none is given up: a stream's in all, a whole answer's from when the
            request has left.
        retry: how a refusal for want of room is waited out; `NO_RETRY` raises it at once.

    Raises:
        BadRequest: the URL is none of HTTP.
    """

    def __init__(
        self,
        url: str = DEFAULT_HTTP_URL,
        *,
        model: str = UNARY_MODEL,
        stream_model: str = MODEL,
        timeout: float = DEFAULT_TIMEOUT,
        retry: Retry = DEFAULT_RETRY,
    ) -> None:
        self._url = http_url(url)
        self._model = model
        self._stream_model = stream_model
        self._timeout = timeout
        self._retry = retry

    def unary(self, request: Request, on_sent: OnSent | None = None) -> Reply:
        """Send a request and wait for the whole reply; text and audio come together, at the end.

        Args:
            request: what to ask.
            on_sent: told after each piece of the body how many bytes have left, and of how many.

        Raises:
            OmniClientError: the request was refused or failed.
        """
        message = to_http(request)
        builder = ReplyBuilder()
        timeout = self._timeout if request.timeout is None else request.timeout

        def attempt() -> list[Delta]:
            answer = self._ask("POST", f"/v2/models/{self._model}/infer", timeout, message, on_sent)
            return from_http(request, *answer)

        for delta in self._retry.blocking(timeout, threading.Event())(attempt):
            builder.add(delta)
        builder.end()
        return builder.reply()

    async def unary_async(self, request: Request, on_sent: OnSent | None = None) -> Reply:
        """`unary` on a thread of its own, which is also the one that calls `on_sent`."""
        return await asyncio.to_thread(self.unary, request, on_sent)

    def stream(self, request: Request, on_sent: OnSent | None = None, *, retry: Retry | None = None) -> Stream:
        """Send a request; its deltas come by iterating over the result, as those of `OmniClient.stream`.

        The server notices a closed stream when it writes to it: before a reply's first text it does not.

        Args:
            request: what to ask.
            on_sent: as `unary` has it.
            retry: as `OmniClient.stream` has it.

        Raises:
            OmniClientError: the request cannot be expressed or sent.
        """
        message = to_generate(request)

        def call(seconds: float) -> EventCall:
            path = f"/v2/models/{self._stream_model}/generate_stream"
            deadline = time.monotonic() + min(seconds, LONGEST_WAIT_S)
            with self._typed_errors(seconds):
                return EventCall(self._sent("POST", path, seconds, message, on_sent), deadline)

        timeout = self._timeout if request.timeout is None else request.timeout
        return Stream(call, EventReader(request), timeout, retry or self._retry)

    def say(self, text: str = "", media: Sequence[Media] = (), **options: Any) -> Reply:
        """`unary` with the arguments of `OmniClient.say`."""
        return self.unary(Request.ask(text, media, **options))

    def ready(self, timeout: float = READY_TIMEOUT) -> bool:
        """True if the server and the model take requests; False where no server can be reached."""
        return self.obstacle(timeout) is None

    def obstacle(self, timeout: float = READY_TIMEOUT) -> str | None:
        """Why the server or the model takes no requests; None where both do."""
        paths = ("/v2/health/ready", f"/v2/models/{self._model}/ready")
        try:
            server, model = (self._ask("GET", path, timeout)[0] == 200 for path in paths)
        except (ConnectionFailed, Timeout) as error:
            return error.message
        return not_ready(server, model, self._model)

    def wait_ready(self, seconds: float) -> bool:
        """Ask again until the server is ready or `seconds` have passed; asks once when `seconds` is 0."""
        return wait_until(self.ready, seconds)

    def models(self, timeout: float = READY_TIMEOUT) -> list[ServedModel]:
        """Models that the server serves; the public ones where the server hides its index.

        Raises:
            OmniClientError: the server could not be asked.
        """
        status, _, body = self._ask("POST", "/v2/repository/index", timeout)
        entries = entries_of(_json(body)) if status == 200 else KNOWN
        return [served_model(entry, self._config(str(entry["name"]), timeout)) for entry in entries]

    def _config(self, name: str, timeout: float) -> Mapping[str, Any] | None:
        status, _, body = self._ask("GET", f"/v2/models/{quote(name, safe='')}/config", timeout)
        return _json(body) if status == 200 else None  # a model that is not loaded has none

    def _ask(
        self,
        method: str,
        path: str,
        timeout: float,
        message: tuple[dict[str, str], bytes] = ({}, b""),
        on_sent: OnSent | None = None,
    ) -> _Answer:
        with (
            self._typed_errors(timeout),
            closing(self._sent(method, path, timeout, message, on_sent)) as connection,
            answer_until(connection, time.monotonic() + min(timeout, LONGEST_WAIT_S)) as response,
        ):
            return response.status, dict(response.getheaders()), content(response)

    def _sent(
        self, method: str, path: str, timeout: float, message: tuple[dict[str, str], bytes], on_sent: OnSent | None
    ) -> http.client.HTTPConnection:
        """A connection of its own, over which the request has left."""
        headers, body = message
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._url.hostname or "", self._url.port, timeout=min(timeout, LONGEST_WAIT_S))
        try:
            sized = headers | {"Content-Length": str(len(body))}
            connection.request(method, self._url.path.rstrip("/") + path, _pieces(body, on_sent), sized)
        except BaseException:
            connection.close()
            raise
        return connection

    def _typed_errors(self, timeout: float) -> AbstractContextManager[None]:
        return typed_errors(self._url.netloc, f"no answer within {timeout:g} s")


def _json(body: bytes) -> Any:
    try:
        return parsed(body)
    except ValueError as error:
        raise Internal(f"the answer is not JSON: {error}") from error


def _pieces(body: bytes, on_sent: OnSent | None) -> Iterator[bytes]:
    """The body piece by piece; the next one is asked for when the last has left."""
    for at in range(0, len(body), PIECE_BYTES):
        piece = body[at : at + PIECE_BYTES]
        yield piece
        if on_sent is not None:
            on_sent(at + len(piece), len(body))
