# SPDX-License-Identifier: Apache-2.0
"""One request over an HTTP connection of its own: what goes wrong with it, and its server-sent events."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import ConnectionFailed, Timeout
from .protocol import EVENT, http_refusal


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
            self._wait_no_longer()
            self._response = self._connection.getresponse()
            if self._response.status != 200:
                raise http_refusal(self._response.status, self._response.read())
        while True:
            self._wait_no_longer()
            line = self._response.readline()
            if not line:
                self._over = True
                return None
            if line.startswith(EVENT):
                return line.removeprefix(EVENT)

    def _wait_no_longer(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

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
