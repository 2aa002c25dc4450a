# SPDX-License-Identifier: Apache-2.0
"""Realtime sessions in memory, of this event loop alone: no socket, and servers that are a few lines of Python."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from starlette.websockets import WebSocket

from gateway_fakes import TIMEOUT_S
from triton_omni_client import Delta, OmniClientError, Reply, Request, Retry, TextDelta, Timings
from triton_omni_client.deltas import AsyncDeltaIterator
from triton_omni_client.reply import ReplyBuilder
from triton_omni_gateway import GatewaySettings
from triton_omni_gateway.errors import GatewayError, Naming
from triton_omni_gateway.keys import ApiKeys
from triton_omni_gateway.metrics import Metrics
from triton_omni_gateway.realtime.endpoint import Realtime
from triton_omni_gateway.realtime.secrets import ClientSecrets
from triton_omni_gateway.speech_to_text import SpeechToText


class Endless(AsyncDeltaIterator):
    """A reply that begins, and ends when it is cancelled."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.cancelled = asyncio.Event()
        self._first: Delta | None = TextDelta("Hello")

    async def __anext__(self) -> Delta:
        first, self._first = self._first, None
        if first is None or self.request.prefill_only:
            await self.cancelled.wait()
            raise StopAsyncIteration
        return first

    def close(self) -> None:
        self.cancelled.set()

    def reply(self) -> Reply:
        return ReplyBuilder().reply()

    def timings(self) -> Timings:
        return Timings(0.1, None, 0.2, 0.0)


class Asked:
    """Servers whose replies are made by a function of the request."""

    def __init__(self, begin: Callable[[Request], Endless] = Endless) -> None:
        self._begin = begin
        self.streams: list[Endless] = []
        self.ended: list[tuple[str, str]] = []
        """Status and reason of each response that has ended."""

    def stream(self, request: Request, *, retry: Retry | None = None) -> Endless:
        self.streams.append(self._begin(request))
        return self.streams[-1]

    async def ask(self, request: Request) -> Endless:
        return self.stream(request)

    async def explain(self, error: OmniClientError, naming: Naming, request_id: str) -> GatewayError:
        raise error

    async def request_limits(self) -> Mapping[str, Any]:
        return {}

    def replied(self, stream: Endless) -> None:
        pass

    def responded(self, response_id: str, status: str, reason: str, seconds: float, timings: Timings | None) -> None:
        self.ended.append((status, reason))


class Connection:
    """A client's side of a session."""

    def __init__(self, servers: Asked) -> None:
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.incoming.put_nowait({"type": "websocket.connect"})
        app = SimpleNamespace(state=SimpleNamespace(gateway=servers))
        state: dict[str, Any] = {"session": {}}
        scope = {
            "type": "websocket",
            "app": app,
            "state": state,
            "query_string": b"",
            "headers": [],
            "subprotocols": [],
        }
        self.socket = WebSocket(scope, self.incoming.get, self._record)
        self.told: list[dict[str, Any]] = []
        """Events since the last one that was waited for."""

    async def _record(self, message: Any) -> None:
        if message["type"] == "websocket.send":
            self.told.append(json.loads(message["text"]))

    def send(self, kind: str, **fields: Any) -> None:
        text = json.dumps({"type": kind, **fields}).encode()
        self.incoming.put_nowait({"type": "websocket.receive", "bytes": text})

    async def until(self, kind: str) -> dict[str, Any]:
        """The next event of this type, and no error before it."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while (event := self._next(kind)) is None:
                    await asyncio.sleep(0.001)
        except TimeoutError as error:
            raise AssertionError(f"no {kind} after {[event['type'] for event in self.told]}") from error
        return event

    def _next(self, kind: str) -> dict[str, Any] | None:
        for place, event in enumerate(self.told):
            if event["type"] == kind:
                del self.told[: place + 1]
                return event
            assert event["type"] != "error", event
        return None

    async def asked(self, kind: str, answer: str, **fields: Any) -> dict[str, Any]:
        """Send an event, and wait for its answer."""
        self.send(kind, **fields)
        return await self.until(answer)

    def leave(self) -> None:
        self.incoming.put_nowait({"type": "websocket.disconnect", "code": 1006})


def realtime(metrics: Metrics | None = None) -> Realtime:
    """The sessions of a gateway."""
    settings, metrics = GatewaySettings(triton_urls=("localhost:1",)), metrics or Metrics()
    return Realtime(settings, ClientSecrets(ApiKeys()), metrics, SpeechToText(settings, metrics.recorded.inc))


@asynccontextmanager
async def connected(servers: Asked, **audio_input: Any) -> AsyncIterator[Connection]:
    """A session whose sound comes as these keys say."""
    client = Connection(servers)
    serving = asyncio.create_task(realtime().serve(client.socket))
    session = {"type": "realtime", "audio": {"input": audio_input}}
    await client.asked("session.update", "session.updated", session=session)
    try:
        yield client
    finally:
        client.leave()
        await serving
