# SPDX-License-Identifier: Apache-2.0
"""A session whose connection is lost cancels all that it asked for before anything else happens: no clock is read."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from starlette.websockets import WebSocket

from realtime_client import noise
from triton_omni_client import Delta, OmniClientError, Reply, Request, Retry, TextDelta, Timings
from triton_omni_client.deltas import AsyncDeltaIterator
from triton_omni_client.reply import ReplyBuilder
from triton_omni_gateway import GatewaySettings
from triton_omni_gateway.errors import GatewayError, Naming
from triton_omni_gateway.keys import ApiKeys
from triton_omni_gateway.metrics import Metrics
from triton_omni_gateway.realtime.endpoint import Realtime
from triton_omni_gateway.realtime.secrets import ClientSecrets

TURNS = 20
"""Rounds of the event loop in which all has to be over; a task takes one or two to end."""


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
    """Servers that begin every reply and end none."""

    def __init__(self) -> None:
        self.streams: list[Endless] = []
        self.ended: list[tuple[str, str]] = []

    def stream(self, request: Request, *, retry: Retry | None = None) -> Endless:
        self.streams.append(Endless(request))
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
    """A client's side of a session, in memory."""

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
        self.told: list[str] = []

    async def _record(self, message: Any) -> None:
        if message["type"] == "websocket.send":
            self.told.append(json.loads(message["text"])["type"])

    def send(self, kind: str, **fields: Any) -> None:
        text = json.dumps({"type": kind, **fields}).encode()
        self.incoming.put_nowait({"type": "websocket.receive", "bytes": text})

    async def until(self, kind: str) -> None:
        while kind not in self.told:
            await asyncio.sleep(0.001)
        self.told.clear()


class Flood(Endless):
    """A reply that has no end."""

    async def __anext__(self) -> Delta:
        await asyncio.sleep(0)
        if self.cancelled.is_set():
            raise StopAsyncIteration
        return TextDelta("word ")


class Flooding(Asked):
    """Servers that answer so."""

    def stream(self, request: Request, *, retry: Retry | None = None) -> Endless:
        self.streams.append(Flood(request))
        return self.streams[-1]


class SlowConnection(Connection):
    """A client that takes the first events, then none."""

    async def _record(self, message: Any) -> None:
        if len(self.told) > 10:
            await asyncio.Event().wait()
        await super()._record(message)


async def test_a_client_that_takes_its_reply_slowly_is_still_heard() -> None:
    servers = Flooding()
    client = SlowConnection(servers)
    realtime = Realtime(GatewaySettings(triton_urls=("localhost:1",)), ClientSecrets(ApiKeys()), Metrics())
    serving = asyncio.create_task(realtime.serve(client.socket))
    client.send("response.create")
    while not servers.streams:
        await asyncio.sleep(0)
    for _ in range(2000):  # far more than all that may be unsent
        await asyncio.sleep(0)
    client.send("response.cancel")
    for _ in range(TURNS):
        await asyncio.sleep(0)
    assert servers.streams[0].cancelled.is_set()
    client.incoming.put_nowait({"type": "websocket.disconnect", "code": 1006})
    await serving


async def test_a_drop_cancels_all_at_once() -> None:
    servers = Asked()
    metrics = Metrics()
    client = Connection(servers)
    realtime = Realtime(GatewaySettings(triton_urls=("localhost:1",)), ClientSecrets(ApiKeys()), metrics)
    serving = asyncio.create_task(realtime.serve(client.socket))
    listening = {"turn_detection": None, "transcription": {"model": "any"}}
    client.send("session.update", session={"type": "realtime", "audio": {"input": listening}})
    client.send("input_audio_buffer.append", audio=base64.b64encode(noise(3).tobytes()).decode())
    client.send("input_audio_buffer.commit")
    await client.until("conversation.item.input_audio_transcription.delta")
    client.send("response.create")
    await client.until("response.output_audio_transcript.delta")
    client.send("response.create", response={"conversation": "none", "instructions": "Tell a story."})
    await client.until("response.output_audio_transcript.delta")
    hint, transcription, reply, aside = servers.streams
    assert (hint.request.prefill_only, transcription.request.priority) == (True, 1)
    assert not any(stream.cancelled.is_set() for stream in servers.streams)

    client.incoming.put_nowait({"type": "websocket.disconnect", "code": 1006})
    for _ in range(TURNS):
        await asyncio.sleep(0)
    assert [stream.cancelled.is_set() for stream in (hint, transcription, reply, aside)] == [True] * 4
    assert serving.done()
    assert serving.exception() is None
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert len(servers.streams) == 4
    assert servers.ended == [("cancelled", "session_ended")] * 2
    assert b"omni_gateway_realtime_sessions 0.0" in metrics.text()
