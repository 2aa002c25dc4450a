# SPDX-License-Identifier: Apache-2.0
"""One request over an HTTP connection of its own: what goes wrong with it, and its server-sent events.

`http.client` sends a request in one call and waits for its answer in another. httpx has one call for both, so no caller
could leave a stream before its first text: Triton sends no header earlier.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, cast

from .errors import ConnectionFailed, Internal, Timeout
from .protocol import EVENT, http_refusal

MAX_ANSWER_BYTES: Final = 1 << 26
"""Most bytes of an answer, and of a line of an answer that is a stream: 64 MiB, two minutes of speech as text."""


@contextmanager
def typed_errors(host: str, late: str) -> Iterator[None]:
    """Errors of sockets and of HTTP as errors of this client; `late` is said when time ran out."""
    try:
        yield
    except TimeoutError as error:
        raise Timeout(late) from error
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionFailed(f"{host}: {_cause(error)}") from error


def _cause(error: OSError | http.client.HTTPException) -> str:
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, OSError):
        return "what answers there is not HTTP; Triton's gRPC port is asked as HOST:PORT, without http://"
    if isinstance(error, ssl.SSLError):
        return f"no TLS ({error.reason}); a server without it is asked as http://"
    return str(error) or type(error).__name__


class _TimedBytes(io.RawIOBase):
    """Reads a socket until a deadline. A timeout of the socket alone would begin anew with each byte.

    Raises:
        TimeoutError: at a read after the deadline.
    """

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        self._socket = connected
        self._received = connected.makefile("rb", buffering=0)
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int | None:  # type: ignore[override]
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)
        return self._received.readinto(buffer)

    def close(self) -> None:
        self._received.close()
        super().close()


class _TimedSocket:
    """The part of a socket that an answer of HTTP is read from."""

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        self._bytes = _TimedBytes(connected, deadline)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self._bytes)


def answer_until(connection: http.client.HTTPConnection, deadline: float) -> http.client.HTTPResponse:
    """The answer to a request that has left; reading it ends at the deadline, by the monotonic clock.

    Raises:
        TimeoutError: the deadline has passed.
        OSError, http.client.HTTPException: the connection broke, or what answers is not HTTP.
    """
    response = http.client.HTTPResponse(cast(socket.socket, _TimedSocket(connection.sock, deadline)))
    try:
        response.begin()
    except BaseException:
        response.close()
        raise
    return response


def content(response: http.client.HTTPResponse) -> bytes:
    """The whole body of an answer.

    Raises:
        Internal: it has more than `MAX_ANSWER_BYTES`.
        OSError, http.client.HTTPException: it did not come whole.
    """
    body = response.read(MAX_ANSWER_BYTES + 1)
    if len(body) > MAX_ANSWER_BYTES:
        raise Internal(f"the answer has more than {MAX_ANSWER_BYTES} bytes, the most that this client takes")
    if response.length:
        raise http.client.IncompleteRead(body, response.length)
    return body


class EventCall:
    """The answer to a request that was sent, event by event; a `Call`, which closes its connection when given up.

    Args:
        connection: over which the request has left.
        deadline: by the monotonic clock; an answer that has not ended by then is a `Timeout`.
    """

    def __init__(self, connection: http.client.HTTPConnection, deadline: float) -> None:
        self._host = f"{connection.host}:{connection.port}"
        self._connection = connection
        self._socket: socket.socket = connection.sock  # the connection may leave it to the response
        self._response: http.client.HTTPResponse | None = None
        self._deadline = deadline
        self._reading = threading.Lock()
        self._over = False

    def receive(self) -> bytes | None:
        """The JSON of the next event; None after the last.

        Raises:
            OmniClientError: the request was refused, or the connection broke or was silent for too long.
        """
        try:
            with self._reading, typed_errors(self._host, "the reply was not complete when its timeout had passed"):
                return self._next_event()
        finally:
            if self._over:
                self._close()

    def _next_event(self) -> bytes | None:
        if self._response is None:
            self._response = answer_until(self._connection, self._deadline)
            if self._response.status != 200:
                raise http_refusal(self._response.status, content(self._response))
        while True:
            line = self._response.readline(MAX_ANSWER_BYTES + 1)
            if len(line) > MAX_ANSWER_BYTES:
                raise Internal(f"a line of the stream has more than {MAX_ANSWER_BYTES} bytes")
            if not line:
                self._over = True
                return None
            if line.startswith(EVENT):
                return line.removeprefix(EVENT)

    def cancel(self) -> None:
        """Close the connection, which the server takes for the end of the request."""
        self._over = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        # A reader now finds an end, and closes; the reader may be this very thread, in a signal's handler.
        if self._reading.acquire(blocking=False):
            self._close()
            self._reading.release()

    def _close(self) -> None:
        if self._response is not None:
            self._response.close()
        self._connection.close()
