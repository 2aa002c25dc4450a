# SPDX-License-Identifier: Apache-2.0
"""Bounds that uvicorn lacks: connections in all and of one peer, idle time, the size of pieces, and requests sent
ahead.

A connection waits while no request of its is under way: before its first one, and after an answer. Where there are too
many, the one that has waited longest goes, so that those who hold connections open keep nobody out. One whose caller
takes nothing of an answer is closed, whatever is under way.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
from typing import Any, TypeGuard

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from .errors import bad_request
from .realtime.protocol import RealtimeProtocol
from .request_log import HTTP, log_unread
from .settings import GatewaySettings, SettingsError

MAX_HEAD_BYTES = 32 << 10
"""Maximum bytes of a request's line and headers together, and of all else that HTTP keeps whole."""
_OTHER_FILES = 128
"""Open at once beside the callers' connections: those to Triton, listening sockets, the page's files."""
SMALL_CHUNKS, CHUNK_BYTES = 4096, 1024
"""A body may come in so many chunks, and in one more for each so many bytes: a chunk takes as long as a KiB or two."""
TRAILERS = "trailers"
"""Under this name a request's state has the list of headers that are sent after an answer of unknown length."""
_LENGTHS = {b"content-length", b"transfer-encoding"}
logger = logging.getLogger("uvicorn.error")


class _BoundedParser(h11.Connection):
    """h11's parser, which refuses a body of too many small chunks, or of two lengths too.

    A proxy and h11 may choose different ones of two lengths, so one's request would hide in the other's body (RFC 9112,
    6.1).
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._chunks = self._bytes = 0
        self.trailers: list[tuple[bytes, bytes]] = []
        """Headers after the answer, for what is known at its end alone; uvicorn has no way to send any."""

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]  # it is overloaded there
        """See h11."""
        if isinstance(event, h11.EndOfMessage) and self.their_http_version == b"1.1":
            event = h11.EndOfMessage(headers=self.trailers)
        return super().send(event)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """See h11.

        Raises:
            RemoteProtocolError: what came is no HTTP, or over a limit.
        """
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
            self.trailers.clear()
            if {name for name, _ in event.headers} >= _LENGTHS:
                raise h11.RemoteProtocolError("two lengths")
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > SMALL_CHUNKS + self._bytes / CHUNK_BYTES:
                raise h11.RemoteProtocolError("too many small chunks")
        return event


class BoundedProtocol(H11Protocol):
    """One connection.

    Args:
        limits: of the gateway.
        config: as uvicorn gives them, with the next three.
    """

    def __init__(
        self,
        limits: GatewaySettings,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger = logging.getLogger(HTTP)
        self.conn: _BoundedParser = _BoundedParser()
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        self.is_aborted = False
        """True if it was closed here; uvicorn hears of that later."""

    @property
    def is_waiting(self) -> bool:
        """True if no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_idle(self) -> bool:
        """True if it waits and has nothing to send."""
        return self.is_waiting and not self.transport.get_write_buffer_size()

    @property
    def peer(self) -> str:
        """The address that it comes from."""
        return self.client[0] if self.client else ""

    @property
    def wait_ends(self) -> float:
        """When it is looked at next, by the event loop's clock; of two that wait the earlier began first."""
        return 0.0 if self._timer is None else self._timer.when()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request, in place of another connection where there are too many."""
        super().connection_made(transport)
        self._watch()
        opened = [one for one in self.connections if isinstance(one, RealtimeProtocol) or _is_open(one)]
        of_peer = [one for one in opened if one.peer == self.peer]
        if len(of_peer) > self._limits.max_peer_connections:
            self._make_room(of_peer, "a peer has as many as --max-peer-connections allows")
        elif len(opened) > self._limits.max_connections:
            self._make_room(opened, "there are as many as --max-connections allows")

    def connection_lost(self, exc: Exception | None) -> None:
        """Watch it no more."""
        super().connection_lost(exc)
        self._watch_no_more()

    def handle_events(self) -> None:
        """Take what has arrived; a request whose head is complete ends the wait.

        A caller that sends the next request before its answer gets no other: answers to thousands of them, each to be
        made in a thread, would be under way for one connection.
        """
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self.cycle.scope["state"][TRAILERS] = self.conn.trailers
            self._watch()
        if not self.is_waiting and self.conn.their_state is h11.DONE and self.conn.trailing_data[0]:
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        """Wait for the next request, which may have arrived."""
        self._watch()
        super().on_response_complete()

    def resume_writing(self) -> None:
        """Note that the caller has taken a part of its answer."""
        super().resume_writing()
        self._unsent = 0

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP in OpenAI's form; in the middle of an answer close the connection."""
        if not self.is_waiting and self.cycle.response_started:
            self.abort()
            return
        chunks = f"its body has over {SMALL_CHUNKS} chunks of under {CHUNK_BYTES} bytes"
        lengths = "has both Content-Length and Transfer-Encoding"
        error = bad_request(f"The request is no HTTP, {lengths}, {chunks}, or its head is over {MAX_HEAD_BYTES} bytes.")
        request_id, body = log_unread(self.client, error), json.dumps(error.body()).encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}x-request-id: {request_id}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Watch it no more: a WebSocket has bounds of its own."""
        self._watch_no_more()
        super().handle_websocket_upgrade(event)

    def _make_room(self, opened: list[BoundedProtocol | RealtimeProtocol], cause: str) -> None:
        """Close the connection that has waited longest, or this one where all others are at work."""
        idle = (one for one in opened if isinstance(one, BoundedProtocol) and one.is_idle)
        longest = min(idle, key=lambda one: one.wait_ends, default=self)
        logger.warning("a connection of %s was closed, since %s", longest.peer, cause)
        longest.abort()

    def abort(self) -> None:
        """Close it now, whatever was not sent."""
        self.is_aborted = True
        self.transport.abort()

    def _watch(self) -> None:
        self._unsent = 0
        self._look_later()

    def _look_later(self) -> None:
        self._watch_no_more()
        limits = self._limits
        seconds = limits.head_timeout_s if self.is_waiting else limits.send_timeout_s
        self._timer = self.loop.call_later(seconds, self._look)

    def _watch_no_more(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Close it if its caller has sent no request in time, or has taken nothing of an answer since the last look.

        To a slow network an answer is written long before it is sent.
        """
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        is_stuck = bool(self._unsent) and self._unsent == before
        if is_stuck or self.is_idle:
            self.abort()
        else:
            self._look_later()


def _is_open(connection: object) -> TypeGuard[BoundedProtocol]:
    return isinstance(connection, BoundedProtocol) and not connection.is_aborted


def allow_open_files(connections: int) -> None:
    """Let this process have as many files open as it may have connections.

    Raises:
        SettingsError: the system does not allow so many.
    """
    needed = connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        said = f"--max-connections {connections} needs {needed} open files, and the limit is {hard}"
        raise SettingsError(f"{said}; raise it (ulimit -Hn, LimitNOFILE) or allow fewer connections")
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
