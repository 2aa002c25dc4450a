# SPDX-License-Identifier: Apache-2.0
"""The official client of the Realtime API, for tests of sessions: what a session sends, in order."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openai
import soundfile
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

from client_fakes import INFO, chunk, final, inputs_of
from gateway_fakes import MODEL, TIMEOUT_S

EVENT: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
"""Checks an event against OpenAI's types, which their client does not."""
SPEECH = Path(__file__).parents[1] / "docs" / "images" / "reply.wav"

MANUAL: dict[str, Any] = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}


WHOLE = {**INFO, "finish_reason": {"thinker": "stop", "talker": "stop", "token2wav": "stop"}}


def greeting(_request: Any, _context: Any) -> Iterator[Any]:
    yield chunk(text="Hello")
    yield chunk(text=", sea.", audio=np.full(480, 0.25, np.float32))
    yield chunk(audio=np.full(480, -0.5, np.float32))
    yield chunk(info=WHOLE)
    yield final()


def chat_of(request: Any) -> list[Any]:
    """The chat that a server was sent, without its media."""
    found: list[Any] = json.loads(inputs_of(request)["messages"][0])
    return found


@dataclass
class Talk:
    """One session."""

    connection: Any
    seen: list[Any] = field(default_factory=list)
    """All events so far."""

    async def send(self, kind: str, **fields: Any) -> None:
        await self.connection.send({"type": kind, **fields})

    async def until(self, kind: str, **fields: Any) -> Any:
        """The next event of this type, and with these fields."""
        while True:
            try:
                event = EVENT.validate_json(await asyncio.wait_for(self.connection.recv_bytes(), TIMEOUT_S))
            except TimeoutError as error:
                raise AssertionError(f"no {kind} after {self.types()}") from error
            self.seen.append(event)
            if event.type == "error" and kind != "error":
                raise AssertionError(event.error)
            if event.type == kind and all(getattr(event, name) == value for name, value in fields.items()):
                return event

    async def asked(self, kind: str, answer: str, **fields: Any) -> Any:
        """Send an event, and wait for its answer."""
        await self.send(kind, **fields)
        return await self.until(answer)

    async def refused(self, kind: str, **fields: Any) -> Any:
        """Send an event that is refused; the error, which names it."""
        error = (await self.asked(kind, "error", event_id="mine", **fields)).error
        assert error.event_id == "mine"
        return error

    async def say(self, text: str) -> Any:
        """The user writes."""
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        return (await self.asked("conversation.item.create", "conversation.item.done", item=item)).item

    async def append(self, samples: Any) -> None:
        """Sound of the user, int16 at the session's rate."""
        await self.send("input_audio_buffer.append", audio=base64.b64encode(samples.astype("<i2").tobytes()).decode())

    def types(self) -> list[str]:
        """Types of all events so far, without those that come in any number."""
        return [event.type for event in self.seen if not event.type.endswith(".delta")]

    def joined(self, kind: str, key: Callable[[Any], str] = lambda event: str(event.delta)) -> str:
        """The deltas of a type."""
        return "".join(key(event) for event in self.seen if event.type == kind)

    def heard(self) -> bytes:
        """All sound of replies."""
        return b"".join(base64.b64decode(e.delta) for e in self.seen if e.type == "response.output_audio.delta")


@asynccontextmanager
async def talk(
    base: str, key: str = "any", model: str = MODEL, intent: str = "", **session: Any
) -> AsyncIterator[Talk]:
    """A session with a gateway, configured; without a configuration it is as it began."""
    async with (
        openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=key, timeout=TIMEOUT_S) as client,
        client.realtime.connect(
            model=model,
            max_retries=0,
            extra_query={"intent": intent},
            # Or it would not see the end of a connection whose events are not all taken, and wait for ten seconds.
            websocket_connection_options={"max_queue": None},
        ) as connection,
    ):
        made = Talk(connection)
        await made.until("session.created")
        if session:
            await made.asked("session.update", "session.updated", session={"type": "realtime", **session})
        yield made


def noise(seconds: float, rate: int = 24000, seed: int = 7) -> Any:
    """Loud sound, int16, that is no speech."""
    return np.random.default_rng(seed).integers(-9000, 9000, int(seconds * rate), dtype=np.int16)


def speech(seconds: float) -> Any:
    """Recorded speech, int16 at 24 kHz."""
    samples, _ = soundfile.read(SPEECH, dtype="int16", frames=int(seconds * 24_000))
    return samples
