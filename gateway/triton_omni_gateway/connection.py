# SPDX-License-Identifier: Apache-2.0
"""One caller's connection: its body under limits, work that ends when the caller leaves, answers that flow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ClientGone, CutOff, GatewayError, too_large

T = TypeVar("T")

CLIENT_GONE = 499
"""Status in metrics and logs of a caller that left before its answer; nginx's number."""


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """The whole body.

    Raises:
        GatewayError: 413 over `limit` bytes, before more of it is kept; 408 when it has not arrived within `seconds`.
        ClientGone: the caller left.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                if len(body) + len(part) > limit:
                    raise too_large(limit)
                body += part
    except TimeoutError as error:
        raise GatewayError(408, f"The request's body did not arrive within {seconds:g} s.") from error
    except ClientDisconnect as error:
        raise ClientGone from error
    return bytes(body)


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the caller leaves first; the body must have been read.

    Raises:
        ClientGone: the caller left.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class FlowingResponse(Response):
    """An answer sent piece by piece as it is made; the maker is closed at its end, or as soon as the caller leaves.

    A maker that raises `CutOff` has the connection closed, so that the caller does not take a part for the whole. So
    has a caller that takes no part for `send_timeout_s`, who would keep a place for as long as it likes.

    Args:
        parts: makes the answer.
        media_type: of the whole.
        send_timeout_s: in which each part has to be taken.
        headers: sent in front of the first part, besides those of every flowing answer.
    """

    def __init__(
        self,
        parts: AsyncGenerator[bytes, None],
        media_type: str,
        send_timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.body = b""
        self._parts = parts
        self._send_timeout_s = send_timeout_s
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all."""
        try:
            async with aclosing(self._parts):
                await until_gone(receive, self._send(send))
        except ClientGone:
            scope["state"]["status"] = CLIENT_GONE
        except TimeoutError:
            scope["state"]["status"] = CLIENT_GONE  # and the connection is closed like any whose answer was not ended
        except CutOff:
            return  # uvicorn closes a connection whose answer was not ended

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await self._in_time(send(start))
        async for part in self._parts:
            await self._in_time(send({"type": "http.response.body", "body": part, "more_body": True}))
        await self._in_time(send({"type": "http.response.body", "body": b"", "more_body": False}))

    async def _in_time(self, sending: Awaitable[None]) -> None:
        async with asyncio.timeout(self._send_timeout_s):
            await sending
