# SPDX-License-Identifier: Apache-2.0
"""Sessions of random events, in any order and of any kind: each is answered or refused by name, and nothing is left."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.client import connect

from client_fakes import FakeTriton, chunk, failure, serve_grpc
from gateway_fakes import TIMEOUT_S, run_gateway, tracebacks
from realtime_client import greeting, noise, speech

IDS = ["a", "b", "c", "nobody"]
FAULTS = ["", "x", None, 0, -1, 10**30, 1.5, [], {}, ["a"], {"a": None}, "root", "\ud800", "a" * 600]


class Mixed:
    """A script: greetings, refusals, and replies that end when nobody wants them any more."""

    def __init__(self) -> None:
        self.asked = itertools.count()
        self.open: set[int] = set()
        """Numbers of the endless replies that somebody still wants."""

    def __call__(self, request: Any, context: Any) -> Iterator[Any]:
        number = next(self.asked)
        if number % 5 == 4:
            yield failure("no free session [omni:overloaded;stage=thinker;retry_after_ms=250]")
        elif number % 5 == 3:
            yield from self.endless(number, context)
        else:
            yield from greeting(request, context)

    def endless(self, number: int, context: Any) -> Iterator[Any]:
        self.open.add(number)
        try:
            yield chunk(text="Hello", audio=np.zeros(480, np.float32))
            while context.is_active():
                time.sleep(0.01)
        finally:
            self.open.remove(number)


def random_event(draw: random.Random) -> dict[str, Any]:
    """One that may be right."""
    spoken = [speech(0.4), np.zeros(18_000, np.int16), noise(0.1)]
    parts = [{"type": "input_text", "text": "Hi."}, {"type": "input_audio", "audio": "AAAA"}, {"type": "output_text"}]
    item = {"type": "message", "role": draw.choice(["user", "assistant", "system"]), "id": draw.choice(IDS)}
    detection = draw.choice([None, {"type": "server_vad", "silence_duration_ms": 200}, {"type": "semantic_vad"}])
    audio = {"input": {"turn_detection": detection, "format": {"type": draw.choice(["audio/pcm", "audio/pcmu"])}}}
    events: list[dict[str, Any]] = [
        {"type": "session.update", "session": {"type": "realtime", "audio": audio}},
        {"type": "session.update", "session": {"output_modalities": [draw.choice(["text", "audio"])]}},
        {"type": "input_audio_buffer.append", "audio": base64.b64encode(draw.choice(spoken).tobytes()).decode()},
        {"type": "input_audio_buffer.commit"},
        {"type": "input_audio_buffer.clear"},
        {"type": "conversation.item.create", "item": {**item, "content": [draw.choice(parts)]}},
        {"type": "conversation.item.retrieve", "item_id": draw.choice(IDS)},
        {"type": "conversation.item.delete", "item_id": draw.choice(IDS)},
        {"type": "conversation.item.truncate", "item_id": draw.choice(IDS), "content_index": 0, "audio_end_ms": 5},
        {"type": "response.create"},
        {"type": "response.create", "response": {"conversation": "none", "input": [{**item, "content": parts[:1]}]}},
        {"type": "response.cancel"},
    ]
    return draw.choice(events)


def broken(event: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """The same with a fault somewhere."""
    place, key = event, draw.choice(list(event))
    while isinstance(place[key], dict) and place[key] and draw.random() < 0.8:
        place = place[key]
        key = draw.choice(list(place))
    changed = {**place, key: draw.choice(FAULTS)}
    return changed if place is event else json.loads(json.dumps(event).replace(json.dumps(place), json.dumps(changed)))


@pytest.mark.parametrize(("seed", "kind"), [(0, "realtime"), (1, "realtime"), (2, "realtime"), (3, "transcription")])
async def test_random_events_are_answered_and_nothing_is_left(
    caplog: pytest.LogCaptureFixture, seed: int, kind: str
) -> None:
    draw, script = random.Random(seed), Mixed()
    with serve_grpc(FakeTriton(script)) as triton, run_gateway(triton.url) as gateway:
        url = f"{gateway.base.replace('http', 'ws')}/v1/realtime?intent={kind}"
        async with connect(url, max_queue=None) as socket:
            for number in range(150):
                event = random_event(draw)
                event = broken(event, draw) if draw.random() < 0.3 else event
                text = json.dumps({**event, "event_id": f"{number}"})
                await socket.send(text.replace('"type": "realtime"', f'"type": "{kind}"'))
            await socket.send(json.dumps({"type": "nonsense", "event_id": "last"}))
            kinds = await until_last(socket)
        await asyncio.to_thread(gateway.wait_for_metric, "omni_gateway_realtime_sessions", 0)
        await asyncio.to_thread(until, lambda: not script.open)
    assert kinds["session.updated"] > 0
    assert kinds["error"] > 10
    assert tracebacks(caplog.records) == []


async def until_last(socket: Any) -> dict[str, int]:
    """The numbers of events by type, until the last one sent is answered."""
    kinds: dict[str, int] = {}
    while True:
        event = json.loads(await asyncio.wait_for(socket.recv(), TIMEOUT_S))
        kinds[event["type"]] = kinds.get(event["type"], 0) + 1
        if event["type"] == "error":
            assert event["error"]["type"] == "invalid_request_error", event
            if event["error"]["event_id"] == "last":
                return kinds


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
