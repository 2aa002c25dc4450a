# SPDX-License-Identifier: Apache-2.0
"""A gateway in this process for tests: uvicorn in a thread on a free loopback port, and its callers."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from media_samples import audio_file
from triton_omni_gateway import GatewaySettings, pool
from triton_omni_gateway.keys import ApiKeys
from triton_omni_gateway.server import Command, GatewayServer, bind, make_server

MODEL = "qwen2_5_omni"
USER = [{"role": "user", "content": "hi"}]
NOT_NOW = (
    "No triton-omni server takes requests now: it starts, restarts a stage or stops. Send the request again later."
)
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": MODEL, "messages": USER}),
    ("/v1/chat/completions", {"model": MODEL, "messages": USER, "stream": True}),
    ("/v1/audio/speech", {"model": MODEL, "input": "hello", "voice": "Ethan"}),
]
"""All that a gateway can be asked for by JSON."""
TIMEOUT_S = 100.0
"""Seconds for a reply, enough on a machine with other work."""


class Lines(logging.Handler):
    """Keeps the records of requests."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.all.append(record)

    @property
    def records(self) -> list[Any]:
        """Those of requests to the model."""
        return [record for record in self.all if getattr(record, "method", None) == "POST"]

    async def of_session(self) -> Any:
        """The line of the one session, after those of its responses; waits for its end."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (found := [record for record in self.all if getattr(record, "method", None) == "WebSocket"]):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        (line,) = found
        return line


class RunningGateway:
    """One gateway; clients made here are closed with it."""

    def __init__(self, base: str, server: GatewayServer) -> None:
        self.base = base
        self._server = server
        self.http = httpx.Client(base_url=base, timeout=TIMEOUT_S)
        self.openai = openai.OpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0, timeout=TIMEOUT_S)

    @property
    def connections(self) -> list[Any]:
        """Connections that its callers have open, as uvicorn keeps them."""
        return list(self._server.server_state.connections)

    def stop(self) -> None:
        """Tell the gateway to stop, and return at once."""
        self._server.should_exit = True

    def chat(self, **options: Any) -> Any:
        """One chat completion by the official client."""
        return self.openai.chat.completions.create(**{"model": MODEL, "messages": USER, **options})

    def post(self, body: Any, path: str = "/v1/chat/completions", **options: Any) -> httpx.Response:
        """A request by hand."""
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        headers = {"Content-Type": "application/json", **options.pop("headers", {})}
        return self.http.post(path, content=content, headers=headers, **options)

    def transcribe(self, **fields: str) -> httpx.Response:
        """Half a second of sound, to be written down, by hand."""
        files = {"file": ("said.wav", audio_file("wav"))}
        return self.http.post("/v1/audio/transcriptions", data={"model": MODEL, **fields}, files=files)

    def metric(self, line: str) -> float:
        """The value of one line of /metrics; 0 when it is not there."""
        found = [text for text in self.http.get("/metrics").text.splitlines() if text.startswith(f"{line} ")]
        return float(found[0].rsplit(" ", 1)[1]) if found else 0.0

    def wait_for_metric(self, line: str, value: float) -> None:
        """Wait for a figure, since an answer is counted after its last byte has left."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.metric(line) != value:
            assert time.monotonic() < deadline, self.http.get("/metrics").text
            time.sleep(0.02)

    def connect(self, receive_bytes: int | None = None) -> socket.socket:
        """A connection by hand, whose receiving buffer may be a small one."""
        connection = socket.socket()
        connection.settimeout(TIMEOUT_S)
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.connect((self.http.base_url.host, self.http.base_url.port))
        return connection

    def wait_until_live(self) -> None:
        """Wait until a new connection is answered, where the gateway closes those that are too slow or too many."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self._is_live():
            assert time.monotonic() < deadline, "no new connection is answered"
            time.sleep(0.05)

    def _is_live(self) -> bool:
        try:
            return httpx.get(f"{self.base}/health/live").status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def run_gateway(
    *triton_urls: str, keys: ApiKeys | None = None, grace_s: int = 1, log_level: str = "warning", **settings: Any
) -> Iterator[RunningGateway]:
    """A gateway in front of these Triton servers, each of which is ready however slowly it says so."""
    command = Command(
        settings=GatewaySettings(triton_urls=triton_urls, **settings),
        keys=keys or ApiKeys(),
        host="127.0.0.1",
        port=0,
        wait_s=0,
        grace_s=grace_s,
        log_level=log_level,
    )
    listening = bind(command.host, command.port)
    server = make_server(command, listening)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    running = RunningGateway(f"http://127.0.0.1:{listening.getsockname()[1]}", server)
    with running.http, running.openai, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "ASK_S", TIMEOUT_S)
        thread.start()
        try:
            yield running
        finally:
            running.stop()
            thread.join(TIMEOUT_S)
            listening.close()
            assert not thread.is_alive()


def assert_not_now(gateway: RunningGateway) -> None:
    """Each request is refused in the gateway's own words, with a time to come back, since no server is ready."""
    answers = [gateway.post(body, path) for path, body in ASKED]
    for answer in (*answers, gateway.transcribe(), gateway.transcribe(stream="true")):
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, NOT_NOW), answer.text
        assert int(answer.headers["retry-after"]) > 0


def tracebacks(records: Iterable[logging.LogRecord]) -> list[logging.LogRecord]:
    """Records with a traceback, without those of gRPC's poller: all event loops of this process share it, and it logs
    that another one was faster.
    """
    return [record for record in records if record.exc_info and record.exc_info[0] is not BlockingIOError]
