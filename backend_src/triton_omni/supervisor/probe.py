# SPDX-License-Identifier: Apache-2.0
"""Probes a tritonserver for readiness and for closed ports, and asks it for a first spoken reply that nobody hears.

That reply comes before the server counts as ready, so kernels are compiled, libraries loaded and figures published by
then. It knows the public contract alone.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Final

from triton_omni.core.arguments import say

_PROBE_TIMEOUT_S = 2.0
_LOOK_EVERY_S = 1.0
_HUNG_UP_S = 5.0


def own_host(host: str) -> str:
    """Return the host at which this machine reaches a server that listens at `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def address(host: str, port: int) -> str:
    """`HOST:PORT`, as clients of Triton take it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Probe:
    """Asks one server.

    Args:
        host: address on which it listens.
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

        It looks once a second at most.
        """
        now = time.monotonic()
        if now - self._looked >= _LOOK_EVERY_S:
            self._looked = now
            if not self._refuses_connections():
                self._heard = now
        return now - self._heard > _HUNG_UP_S

    def _answers(self, service: str, path: str) -> bool:
        connection = http.client.HTTPConnection(self._host, self._ports[service], timeout=_PROBE_TIMEOUT_S)
        # Connecting fails before the server listens; while models load, it answers no.
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("GET", path)
            return connection.getresponse().status == 200
        return False

    def _refuses_connections(self) -> bool:
        try:
            socket.create_connection((self._host, self._ports["http"]), timeout=_PROBE_TIMEOUT_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:  # it is slow
            return False
        return False


# --- the first reply --------------------------------------------------------------------------------------------------


REQUEST_ID: Final = "warm-up"
_PATH: Final = "/v2/models/qwen2_5_omni/generate_stream"
_REPLY_TIMEOUT_S: Final = 120.0
_POLL_S: Final = 0.1
_SHOWN: Final = 500
"""Maximum characters shown of a refusal."""
# Sampled, like most callers' requests, and long enough for a second window.
_SAMPLING: Final = {
    "seed": 0,
    "thinker": {"temperature": 1.0, "max_tokens": 40},
    "talker": {"max_tokens": 60},
    "token2wav": {"mode": "streaming"},
}
_REQUEST: Final = {
    "id": REQUEST_ID,
    "text_input": "Say a sentence about the weather, please.",
    "sampling_parameters": json.dumps(_SAMPLING),
}


def warm_up(host: str, http_port: int, given_up: Callable[[], bool]) -> None:
    """Have a short reply spoken. A failure is only reported on standard error, since other requests may succeed.

    Args:
        host: address on which the server listens.
        http_port: of Triton's HTTP service.
        given_up: polled; True ends the wait, since a first reply may compile for minutes.
    """
    reasons: list[str | None] = []
    asking = threading.Thread(target=lambda: reasons.append(_ask(host, http_port)), name="warm-up", daemon=True)
    asking.start()
    while asking.is_alive() and not given_up():
        asking.join(_POLL_S)
    if reason := next(iter(reasons), None):
        say(f"warning: the server's own first request failed: {reason}")


def _ask(host: str, http_port: int) -> str | None:
    """Return why there was no reply; None = there was one."""
    connection = http.client.HTTPConnection(own_host(host), http_port, timeout=_REPLY_TIMEOUT_S)
    try:
        with closing(connection):
            connection.request("POST", _PATH, json.dumps(_REQUEST), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            events = answer.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    if answer.status == 200 and '"error":' not in events:
        return None
    return f"status {answer.status}: {events[-_SHOWN:].strip()}"
