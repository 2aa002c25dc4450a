# SPDX-License-Identifier: Apache-2.0
"""Measures realtime sessions of a gateway as their users notice them.

    python scripts/realtime_times.py http://127.0.0.1:8080 question.wav [--sessions N] [--turns N] [--cuts N]
        [--metrics URL]

Each session speaks the question (24 kHz, mono) in its own time, in pieces of 20 ms, and takes the whole reply before
the next turn. Milliseconds, median and p95 of all turns:

- manual: from the end of the question, which is committed then, to the first audio
- server_vad: from the end of the question to `speech_stopped` (its silence), and from there to the first audio
- barge-in: from the first sample of speech in a reply to `response.done`, and to no session in any stage. The metrics
  of a Triton server without other users tell the latter, ten times a second, so only one session can measure it. A
  reply that ends before it is interrupted is not counted
- drop: from the loss of a connection in a reply to no session in any stage, told and counted as those

A reply without sound, which random weights may give, is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import time
import wave
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
from markdown_table import table

from triton_omni_client.bench.statistics import percentile
from triton_omni_client.bench.triton_metrics import samples

RATE = 24_000
PIECE_S = 0.02
PIECE = int(RATE * PIECE_S) * 2
VAD = {"type": "server_vad", "silence_duration_ms": 500}
KINDS = {
    "manual_first_audio": "manual: end of speech, first audio",
    "vad_speech_stopped": "server_vad: end of speech, speech_stopped",
    "vad_first_audio": "server_vad: speech_stopped, first audio",
    "barge_in_done": "barge-in: speech, response.done",
    "barge_in_idle": "barge-in: speech, idle engines",
    "drop_idle": "lost connection, idle engines",
}
"""What is measured."""
LONGEST_S = 120.0
"""How long a user waits for an event."""


class Times:
    """Milliseconds by a key of `KINDS`."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = defaultdict(list)

    def add(self, kind: str, begin: float, end: float) -> None:
        """Keep a time between two moments of `time.monotonic`."""
        self.found[kind].append(1000 * (end - begin))

    def lines(self) -> list[str]:
        """A Markdown table."""
        rows = [(KINDS[kind], str(len(times)), _ms(times, 50), _ms(times, 95)) for kind, times in self.found.items()]
        return list(table(("from … to", "turns", "median, ms", "p95, ms"), rows))


def _ms(times: list[float], percent: int) -> str:
    found = percentile(times, percent)
    return "" if found is None else f"{found:.0f}"


class User:
    """One session and its user."""

    def __init__(self, connection: Any, question: bytes, times: Times, metrics: str) -> None:
        self._connection, self._question, self._times, self._metrics = connection, question, times, metrics
        self._seen: dict[str, float] = {}
        """When each type of event came last."""
        self._changed = asyncio.Condition()
        self._was_cut = False
        """True if the last response was cancelled."""

    async def listen(self) -> None:
        """Take all events.

        Raises:
            RuntimeError: the session refused something, or a response failed.
        """
        async for event in self._connection:
            if event.type == "error":
                raise RuntimeError(event.error.message)
            if event.type == "response.done":
                self._was_cut = event.response.status == "cancelled"
                if event.response.status == "failed":
                    raise RuntimeError(event.response.status_details.error.message)
            async with self._changed:
                self._seen.setdefault(event.type, time.monotonic())
                self._changed.notify_all()

    async def until(self, *kinds: str) -> float:
        """Return when the first event of one of these types came in this turn.

        Raises:
            TimeoutError: none came; the message names the events that did.
        """
        try:
            async with asyncio.timeout(LONGEST_S), self._changed:
                await self._changed.wait_for(lambda: not self._seen.keys().isdisjoint(kinds))
        except TimeoutError:
            raise TimeoutError(f"no {kinds} within {LONGEST_S:g} s, after {list(self._seen)}") from None
        return min(self._seen[kind] for kind in kinds if kind in self._seen)

    async def _whole_reply(self, kind: str, begin: float) -> None:
        """Take a reply to its end, and time its first audio."""
        await self.until("response.done")
        if (audio := self._seen.get("response.output_audio.delta")) is not None:
            self._times.add(kind, begin, audio)

    async def speak(self, sound: bytes, enough: str = "") -> None:
        """Send sound in its own time, until an event of the type `enough` comes."""
        begin = time.monotonic()
        for number, at in enumerate(range(0, len(sound), PIECE), 1):
            await self._connection.input_audio_buffer.append(audio=base64.b64encode(sound[at : at + PIECE]).decode())
            if enough in self._seen:
                return
            await asyncio.sleep(begin + number * PIECE_S - time.monotonic())

    async def detect(self, detection: dict[str, Any] | None) -> None:
        """Choose how turns are found."""
        session: Any = {"type": "realtime", "audio": {"input": {"turn_detection": detection}}}
        self._seen.clear()
        await self._connection.session.update(session=session)
        await self.until("session.updated")

    async def manual(self) -> None:
        """A turn that is committed."""
        self._seen.clear()
        await self.speak(self._question)
        end = time.monotonic()
        await self._connection.input_audio_buffer.commit()
        await self._connection.response.create()
        await self._whole_reply("manual_first_audio", end)

    async def detected(self) -> None:
        """A turn that is found."""
        self._seen.clear()
        await self.speak(self._question)
        end = time.monotonic()
        await self.speak(bytes(4 * RATE), "input_audio_buffer.speech_stopped")
        stopped = await self.until("input_audio_buffer.speech_stopped")
        self._times.add("vad_speech_stopped", end, stopped)
        await self._whole_reply("vad_first_audio", stopped)

    async def interrupt(self) -> None:
        """A reply that is interrupted as soon as it is heard."""
        self._seen.clear()
        await self._connection.response.create()
        await self.until("response.output_audio.delta", "response.done")
        if "response.done" in self._seen:
            return
        begin = time.monotonic()
        await self.speak(self._question, "response.done")
        done = await self.until("response.done")
        idle = await _idle(self._metrics) if self._metrics else None
        if self._was_cut:
            self._times.add("barge_in_done", begin, done)
            if idle is not None:
                self._times.add("barge_in_idle", begin, idle)
        await self._connection.input_audio_buffer.clear()


async def _idle(url: str) -> float:
    """Return when no stage has a session."""
    async with httpx.AsyncClient() as client:
        while any(value for name, _, value in samples((await client.get(url)).text) if name == "omni_sessions"):
            pass
    return time.monotonic()


@dataclass(frozen=True)
class Load:
    """Sessions at once, and what each does.

    Attributes:
        gateway: its address.
        question: PCM16, mono, 24 kHz.
        turns: of each kind and session, without those that are interrupted.
        cuts: turns of a session that are interrupted; with `metrics` as many sessions are lost after it.
        metrics: the stages' metrics; empty = not asked.
    """

    gateway: str
    question: bytes
    sessions: int = 1
    turns: int = 10
    cuts: int = 10
    model: str = "qwen2_5_omni"
    key: str = "any"
    metrics: str = ""


async def converse(load: Load, times: Times) -> None:
    """One session."""
    async with (
        openai.AsyncOpenAI(base_url=f"{load.gateway}/v1", api_key=load.key) as client,
        client.realtime.connect(model=load.model, max_retries=0) as connection,
    ):
        user = User(connection, load.question, times, load.metrics)
        listening = asyncio.create_task(user.listen())
        talking = asyncio.create_task(_turns(user, load))
        await asyncio.wait((listening, talking), return_when=asyncio.FIRST_COMPLETED)
        talking.cancel()
        listening.cancel()
        for ended in await asyncio.gather(listening, talking, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended


async def _turns(user: User, load: Load) -> None:
    await user.detect(None)
    for _ in range(load.turns):
        await user.manual()
    await user.detect(VAD)
    for _ in range(load.turns):
        await user.detected()
    for _ in range(load.cuts):
        await user.interrupt()


async def drop(load: Load, times: Times) -> None:
    """One session whose connection is lost as soon as a reply is heard."""
    async with (
        openai.AsyncOpenAI(base_url=f"{load.gateway}/v1", api_key=load.key) as client,
        client.realtime.connect(model=load.model, max_retries=0) as connection,
    ):
        said: Any = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Tell me a story."}]}
        await connection.conversation.item.create(item=said)
        await connection.response.create()
        async for event in connection:
            if event.type == "response.done":
                return
            if event.type == "response.output_audio.delta":
                break
        begin = time.monotonic()
        connection._connection.transport.abort()
    times.add("drop_idle", begin, await _idle(load.metrics))


def read_question(path: Path, seconds: float | None = None) -> bytes:
    """Return the samples of a WAV file, the first `seconds` of them if given.

    Raises:
        SystemExit: it is not PCM16, mono, 24 kHz.
    """
    with wave.open(str(path)) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (RATE, 1, 2):
            raise SystemExit(f"{path}: must be PCM16, mono, {RATE} Hz")
        samples: bytes = file.readframes(file.getnframes() if seconds is None else round(seconds * RATE))
        return samples


async def measure(load: Load) -> Times:
    """All sessions at once, begun within one question's length of each other."""
    times, apart = Times(), len(load.question) / 2 / RATE / load.sessions

    async def later(number: int) -> None:
        await asyncio.sleep(number * apart)
        await converse(load, times)

    await asyncio.gather(*map(later, range(load.sessions)))
    for _ in range(load.cuts if load.metrics else 0):
        await drop(load, times)
    return times


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gateway", help="its address")
    parser.add_argument("question", type=Path, help="WAV file of a spoken question")
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--turns", type=int, default=10, help="of each kind and session (default 10)")
    parser.add_argument("--cuts", type=int, default=10, help="turns that are interrupted (default 10)")
    parser.add_argument("--model", default="qwen2_5_omni")
    parser.add_argument("--key", default=os.environ.get("OPENAI_API_KEY", "any"))
    parser.add_argument("--metrics", default="", help="the stages' metrics, such as http://127.0.0.1:8002/metrics")
    asked = vars(parser.parse_args(arguments))
    load = Load(**asked | {"question": read_question(asked["question"])})
    print("\n".join(asyncio.run(measure(load)).lines()))


if __name__ == "__main__":
    main()
