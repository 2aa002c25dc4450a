# SPDX-License-Identifier: Apache-2.0
"""A session whose connection is lost cancels all that it asked for before anything else happens: no clock is read."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from realtime_client import noise
from realtime_memory import Asked, Connection, Endless, realtime
from triton_omni_client import Delta, TextDelta
from triton_omni_gateway.metrics import Metrics

TURNS = 20
"""Rounds of the event loop in which all has to be over; a task takes one or two to end."""


class Flood(Endless):
    """A reply that has no end."""

    async def __anext__(self) -> Delta:
        await asyncio.sleep(0)
        if self.cancelled.is_set():
            raise StopAsyncIteration
        return TextDelta("word ")


class SlowConnection(Connection):
    """A client that takes the first events, then none."""

    async def _record(self, message: Any) -> None:
        if len(self.told) > 10:
            await asyncio.Event().wait()
        await super()._record(message)


async def test_a_client_that_takes_its_reply_slowly_is_still_heard() -> None:
    servers = Asked(Flood)
    client = SlowConnection(servers)
    serving = asyncio.create_task(realtime().serve(client.socket))
    client.send("response.create")
    while not servers.streams:
        await asyncio.sleep(0)
    for _ in range(2000):  # far more than all that may be unsent
        await asyncio.sleep(0)
    assert len(client.told) == 11
    client.send("response.cancel")
    for _ in range(TURNS):
        await asyncio.sleep(0)
    assert servers.streams[0].cancelled.is_set()
    client.leave()
    await serving


async def test_a_drop_cancels_all_at_once() -> None:
    servers = Asked()
    metrics = Metrics()
    client = Connection(servers)
    serving = asyncio.create_task(realtime(metrics).serve(client.socket))
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

    client.leave()
    for _ in range(TURNS):
        await asyncio.sleep(0)
    assert [stream.cancelled.is_set() for stream in (hint, transcription, reply, aside)] == [True] * 4
    assert serving.done()
    assert serving.exception() is None
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert len(servers.streams) == 4
    assert servers.ended == [("cancelled", "session_ended")] * 2
    assert b"omni_gateway_realtime_sessions 0.0" in metrics.text()
