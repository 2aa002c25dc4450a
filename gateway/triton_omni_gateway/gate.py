# SPDX-License-Identifier: Apache-2.0
"""In front of every request: its id, its key, the limits that hold before its body is read, and its count."""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from .browser_page import is_of_the_page
from .errors import GatewayError, broken, overloaded, stopping, too_large, wrong_key
from .forms import FORM, TAKES_FORM
from .keys import ApiKeys
from .metrics import Metrics
from .origins import JSON, refuse_web_page
from .realtime.door import refuse_socket
from .realtime.secrets import ClientSecrets
from .request_log import log_request, name_lines, new_request_id, note_error
from .settings import GatewaySettings

GUARDED = "/v1/"
"""Paths that need a key where keys are set."""
_LINGER_S = 2.0
_SWITCHED = 101
"""Status of a WebSocket in the log."""
logger = logging.getLogger("uvicorn.error")


def error_response(error: GatewayError) -> JSONResponse:
    """An error as the callers of OpenAI's clients expect it."""
    return JSONResponse(error.body(), error.status, headers=dict(error.headers))


async def refuse(socket: WebSocket, error: GatewayError) -> None:
    """Answer a request for a WebSocket with an error."""
    note_error(socket.scope, error)
    await socket.send_denial_response(error_response(error))


class Gate:
    """ASGI middleware around the whole application.

    Args:
        app: the application that gets what passes.
        settings: its limits.
        keys: who may call.
        metrics: where answers are counted.
        endpoints: paths that are counted by their names; all others together are `other`.
        secrets: who may open realtime sessions, besides.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: GatewaySettings,
        keys: ApiKeys,
        metrics: Metrics,
        endpoints: frozenset[str],
        secrets: ClientSecrets,
    ) -> None:
        self._app = app
        self._settings = settings
        self._keys = keys
        self._metrics = metrics
        self._endpoints = endpoints
        self._client_secrets = secrets
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or refuse it."""
        if scope["type"] == "websocket":
            await self._open_socket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"]
        if method == "HEAD" and not is_of_the_page(scope["path"]):
            scope = {**scope, "method": "GET"}  # uvicorn, which knows the true one, sends no body
        begin, request_id = time.monotonic(), new_request_id()
        name_lines(request_id)
        state = scope.setdefault("state", {})
        state |= {"request_id": request_id, "status": None, "caller": ""}
        exchange = _Exchange(scope, receive, send)
        try:
            await self._answer(scope, exchange)
        except asyncio.CancelledError:
            # So uvicorn ends what outlasts the grace of a stop; an answer that has begun is cut off by returning.
            await self._apologise(scope, exchange, stopping())
        except Exception:
            logger.exception("%s failed", request_id)
            await self._apologise(scope, exchange, broken(request_id))
        finally:
            status, seconds = state["status"] or exchange.status, time.monotonic() - begin
            self._metrics.answered(self._endpoint(scope), status, seconds)
            log_request({**scope, "method": method}, status, seconds, self._keys.name_of(state["caller"]))

    def _endpoint(self, scope: Scope) -> str:
        return scope["path"] if scope["path"] in self._endpoints else "other"

    async def _open_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a WebSocket in, or refuse it before it is one."""
        begin, request_id = time.monotonic(), new_request_id()
        name_lines(request_id)
        state = scope.setdefault("state", {})
        state |= {"request_id": request_id, "caller": "", "session": {}}
        refusal, status = refuse_socket(scope, self._settings, self._keys, self._client_secrets), 500

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "websocket.accept":
                status = _SWITCHED
            elif message["type"] == "websocket.http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
                self._metrics.answered(self._endpoint(scope), status, 0.0)
            await send(message)

        try:
            if refusal is None:
                await self._app(scope, receive, send_named)
            else:
                await refuse(WebSocket(scope, receive, send_named), refusal)
        except Exception:
            note_error(scope, broken(request_id))
            logger.exception("%s failed", request_id)
            raise
        finally:
            name = self._keys.name_of(state["caller"])
            log_request({**scope, "method": "WebSocket"}, status, time.monotonic() - begin, name)

    async def _apologise(self, scope: Scope, exchange: _Exchange, error: GatewayError) -> None:
        note_error(scope, error)
        if not exchange.started:
            await error_response(error)(scope, exchange.receive, exchange.send)

    async def _answer(self, scope: Scope, exchange: _Exchange) -> None:
        if not (scope["method"] == "POST" and scope["path"].startswith(GUARDED)):
            refusal = self._refuse_caller(scope)
            if refusal is None:
                await self._app(scope, exchange.receive, exchange.send)
            else:
                await self._apologise(scope, exchange, refusal)
            return
        if (refusal := self._refuse(scope)) is not None:
            await self._apologise(scope, exchange, refusal)
            return
        self._in_flight += 1
        self._metrics.in_flight.set(self._in_flight)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            self._in_flight -= 1
            self._metrics.in_flight.set(self._in_flight)

    def _refuse_caller(self, scope: Scope) -> GatewayError | None:
        headers = Headers(scope=scope)
        if not scope["path"].startswith(GUARDED):
            return None
        if not self._keys:
            takes = FORM if scope["path"] in TAKES_FORM else JSON
            return refuse_web_page(headers, scope["method"], self._settings.host_names, self._settings.origins, takes)
        authorization = headers.get("authorization", "")
        caller = self._keys.caller(authorization)
        if caller is None:
            return wrong_key(authorization)
        scope["state"]["caller"] = caller
        return None

    def _refuse(self, scope: Scope) -> GatewayError | None:
        """Why a request to the model is not even read: no key, too many at once, or a body known to be too long."""
        if (refusal := self._refuse_caller(scope)) is not None:
            return refusal
        limit = self._settings.max_requests
        if self._in_flight >= limit:
            return overloaded(f"this gateway answers {limit} requests at once, its limit, already; try again later.")
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > self._settings.max_body_bytes:
            return too_large(self._settings.max_body_bytes)
        return None


class _Exchange:
    """Both directions of one request: notes the status, names the request, and lets a refused body run dry.

    A connection that closes while its client still sends is reset, and its answer may be lost. So the rest of a body is
    read and dropped for a moment first.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._request_id: str = scope["state"]["request_id"]
        given = Headers(scope=scope)
        self._body_ended = given.get("content-length", "0") == "0" and "transfer-encoding" not in given
        self.started = False
        """True if the answer has begun."""
        self.status = 500
        """Status of the answer; 500 if none was made."""

    async def receive(self) -> Message:
        """Receive a message of the caller."""
        message = await self._receive()
        self._body_ended |= not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Send a message to the caller."""
        if message["type"] == "http.response.start":
            self.started, self.status = True, message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self._request_id
            if self._refused_midway:
                headers["connection"] = "close"
        elif self._refused_midway and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._run_dry()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    @property
    def _refused_midway(self) -> bool:
        return self.status >= 400 and not self._body_ended

    async def _run_dry(self) -> None:
        try:
            async with asyncio.timeout(_LINGER_S):
                while not self._body_ended:
                    await self.receive()
        except (TimeoutError, asyncio.CancelledError):  # or this process ends
            self._body_ended = True
