# SPDX-License-Identifier: Apache-2.0
"""A WebSocket of uvicorn with a last word when the gateway stops, and an end of clients that take nothing."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final, cast

from starlette.types import Scope
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import SecurityError
from websockets.frames import CloseCode, Frame
from websockets.http11 import MAX_LINE_LENGTH, MAX_NUM_HEADERS, Request, Response

from triton_omni_gateway.errors import GatewayError, stopping
from triton_omni_gateway.request_log import SOCKETS, log_unread, note_forced_end

from .events import error_event, written

_LINGER_S = 2.0
"""Seconds for what was sent to arrive, after the application has ended."""
_MOST_FRAGMENTS = 1 << 14
"""Maximum pieces of one event: the longest one may come in pieces of a KiB."""
_BROKEN_RULES: Final[Mapping[int, str]] = {
    CloseCode.MESSAGE_TOO_BIG: "event_too_large",
    CloseCode.POLICY_VIOLATION: "too_many_fragments",
}
"""Reasons of the log by the code that a session is closed with."""


class RealtimeProtocol(WebSocketsSansIOProtocol):
    """One connection; arguments are uvicorn's."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.logger = self.conn.logger = logging.getLogger(SOCKETS)

    @property
    def peer(self) -> str:
        """The address that it comes from."""
        return self.client[0] if self.client else ""

    def handle_connect(self, event: Request) -> None:
        """Refuse an upgrade that opens no WebSocket in OpenAI's form, with id and line; the gate sees the others."""
        refusal = self.conn.accept(event)
        if refusal.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
            super().handle_connect(event)
            return
        self._refuse(refusal, GatewayError(refusal.status_code, refusal.body.decode().strip()), event.path)

    def data_received(self, data: bytes) -> None:
        """Take what arrived; a head that is no WebSocket's would get no answer from uvicorn."""
        super().data_received(data)
        fault = self.conn.handshake_exc
        if fault is None or self.handshake_complete:
            return
        if isinstance(fault, SecurityError) or isinstance(fault.__cause__, SecurityError):
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            longest = f"A line of the request's head is over {MAX_LINE_LENGTH} bytes"
            said = f"{longest}, or it has over {MAX_NUM_HEADERS} headers: send shorter ones, or fewer."
        else:
            status = HTTPStatus.BAD_REQUEST
            said = "A request for a WebSocket has no body: send it without Content-Length and Transfer-Encoding."
        self._refuse(self.conn.reject(status, said), GatewayError(status, said))

    def _refuse(self, refusal: Response, error: GatewayError, path: str = "-") -> None:
        refusal.body = json.dumps(error.body()).encode()
        del refusal.headers["Content-Length"], refusal.headers["Content-Type"]
        refusal.headers["Content-Length"] = str(len(refusal.body))
        refusal.headers["Content-Type"] = "application/json"
        refusal.headers["X-Request-Id"] = log_unread(self.client, error, "WebSocket", path.partition("?")[0])
        self.handshake_complete = self.close_sent = True
        self.transport.write(refusal.serialize())
        self.transport.close()

    async def send(self, message: Any) -> None:
        """Send what the application says; after a refusal uvicorn would log that the application gave no answer."""
        await super().send(message)
        self.handshake_complete |= self.close_sent

    def handle_ping(self) -> None:
        """Answer a ping, unless its client takes nothing: its answers would pile up."""
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()

    def handle_text(self, event: Frame) -> None:
        """Take a text as its bytes: what is no UTF-8 is then refused by name, and not logged with a traceback."""
        self.handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        """Take a fragment; empty ones could be sent without end."""
        if self.close_sent:
            return
        if len(self.frames) < _MOST_FRAGMENTS:
            super().handle_cont(event)
        else:
            self.conn.fail(CloseCode.POLICY_VIOLATION, f"more than {_MOST_FRAGMENTS} fragments")
            self.handle_parser_exception()

    def handle_parser_exception(self) -> None:
        """Close it, since what came is over a limit or is no WebSocket's."""
        if self.conn.close_sent is not None:
            self._note_end(_BROKEN_RULES.get(self.conn.close_sent.code, "protocol_error"))
        super().handle_parser_exception()

    def _note_end(self, reason: str) -> None:
        if self.handshake_complete and not self.close_sent:
            note_forced_end(cast(Scope, self.scope), reason)

    def shutdown(self) -> None:
        """Tell why it ends, and close with code 1012."""
        self._note_end("stopping")
        if self.handshake_complete and not self.close_sent:
            self.conn.send_text(written(error_event(stopping())).encode())
            self.transport.write(b"".join(self.conn.data_to_send()))
        super().shutdown()

    def keepalive_timeout(self) -> None:
        """Give up a client that answers no ping; what was sent to it may never be taken."""
        self._note_end("no_pong")
        super().keepalive_timeout()
        self.loop.call_later(_LINGER_S, self.transport.abort)

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        """Leave nothing: to close a connection takes until its client has taken what was sent."""
        super().on_task_complete(task)
        self.loop.call_later(_LINGER_S, self.transport.abort)
