# SPDX-License-Identifier: Apache-2.0
"""Probes a tritonserver: it is ready, or it listens no more."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from collections.abc import Mapping

_TIMEOUT_S = 2.0
_LOOK_EVERY_S = 1.0
_HUNG_UP_S = 5.0


def own_host(host: str) -> str:
    """Where a server that listens at `host` is reached from its own machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def address(host: str, port: int) -> str:
    """`HOST:PORT`, as clients of Triton take it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Probe:
    """Asks one server.

    Args:
        host: where it listens.
        ports: by service, `http` and `metrics` among them.
    """

    def __init__(self, host: str, ports: Mapping[str, int]) -> None:
        self._host, self._ports = own_host(host), ports
        self._looked = self._heard = time.monotonic()

    def is_ready(self) -> bool:
        """True if every model is loaded and every port is open."""
        # Metrics too: the server opens that port last, and ends if another program has taken it.
        ready = self._answers("http", "/v2/health/ready") and self._answers("metrics", "/metrics")
        if ready:
            self._heard = time.monotonic()
        return ready

    def has_hung_up(self) -> bool:
        """True if a server that was ready has refused connections for a while: a crashed server may live on.

        Looks once a second, however often it is asked.
        """
        now = time.monotonic()
        if now - self._looked >= _LOOK_EVERY_S:
            self._looked = now
            if not self._refuses_connections():
                self._heard = now
        return now - self._heard > _HUNG_UP_S

    def _answers(self, service: str, path: str) -> bool:
        connection = http.client.HTTPConnection(self._host, self._ports[service], timeout=_TIMEOUT_S)
        # Until the server listens, connecting fails; while models load, it listens and says no.
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("GET", path)
            return connection.getresponse().status == 200
        return False

    def _refuses_connections(self) -> bool:
        try:
            socket.create_connection((self._host, self._ports["http"]), timeout=_TIMEOUT_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:  # it is slow
            return False
        return False
