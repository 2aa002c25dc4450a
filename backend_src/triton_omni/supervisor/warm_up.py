# SPDX-License-Identifier: Apache-2.0
"""A first spoken reply that nobody hears, before callers are let in: kernels are compiled and libraries loaded by then,
and each stage publishes its figures. It knows the public contract alone.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Final

from triton_omni.supervisor.probe import own_host

REQUEST_ID: Final = "warm-up"
_PATH: Final = "/v2/models/qwen2_5_omni/generate_stream"
_TIMEOUT_S: Final = 120.0
_POLL_S: Final = 0.1
_SHOWN: Final = 500
"""Characters of a refusal."""
# Sampled, as most callers' are, and long enough for a second window.
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
    """Have a short reply spoken. A failure is told on standard error and no more: others may be served all the same.

    Args:
        host: where the server listens.
        http_port: of Triton's HTTP service.
        given_up: asked now and then; True ends the wait, for a first reply may compile for minutes.
    """
    reasons: list[str | None] = []
    asking = threading.Thread(target=lambda: reasons.append(_ask(host, http_port)), name="warm-up", daemon=True)
    asking.start()
    while asking.is_alive() and not given_up():
        asking.join(_POLL_S)
    if reason := next(iter(reasons), None):
        print(f"warning: the server's own first request failed: {reason}", file=sys.stderr, flush=True)


def _ask(host: str, http_port: int) -> str | None:
    """Why there was no reply; None = there was."""
    connection = http.client.HTTPConnection(own_host(host), http_port, timeout=_TIMEOUT_S)
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
