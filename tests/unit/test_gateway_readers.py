# SPDX-License-Identifier: Apache-2.0
"""Callers that do not read their answers lose their connections."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from client_fakes import FakeTriton, chunk, final, serve_grpc
from gateway_fakes import MODEL, TIMEOUT_S, USER, run_gateway

UNREAD = {
    "a stream": ("/v1/chat/completions", {"model": MODEL, "messages": USER, "stream": True}),
    "speech": ("/v1/audio/speech", {"model": MODEL, "input": "hello", "response_format": "pcm"}),
    "an answer after one that is not read": ("/v1/chat/completions", {"model": MODEL, "messages": USER}),
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_caller_that_takes_nothing_loses_its_connection(name: str) -> None:
    """Each kept its place for ever: uvicorn closes a connection only once all that it wrote is sent."""

    def loud(_request: Any, context: Any) -> Iterator[Any]:
        for _ in range(100):
            yield chunk(text="word " * 20_000, audio=np.zeros(50_000, np.float32))
        yield final()

    path, body = UNREAD[name]
    content = json.dumps(body).encode()
    asked = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    asked += f"Content-Length: {len(content)}\r\n\r\n"
    limits: dict[str, Any] = {"send_timeout_s": 0.3, "head_timeout_s": TIMEOUT_S, "max_peer_connections": 1}
    with (
        serve_grpc(FakeTriton(script=loud)) as triton,
        run_gateway(triton.url, **limits) as gateway,
        gateway.connect() as connection,
    ):
        connection.sendall(asked.encode() + content)
        assert connection.recv(1) == b"H"
        if "after" in name:
            with suppress(ConnectionError):  # it may be closed by now
                connection.sendall(asked.encode() + content)
        gateway.wait_until_live()  # the only connection that it allows is free again
