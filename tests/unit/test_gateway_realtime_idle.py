# SPDX-License-Identifier: Apache-2.0
"""A user who says nothing after a reply: the timer, and sessions that it rings in, by a clock that jumps."""

from __future__ import annotations

import asyncio
import base64
import io
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import pytest
import soundfile

from realtime_client import speech
from realtime_memory import Asked, Connection, Endless, connected
from triton_omni_client import AudioDelta, Delta, Request, TextDelta
from triton_omni_gateway.realtime.idle import IdleTimer

RATE = 16_000
VAD = {"type": "server_vad", "idle_timeout_ms": 5000}


class _Jumping(selectors.DefaultSelector):
    """Waits for nothing: the clock goes to the next timer at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(timeout and 0)
        if not found and timeout:
            self.now += timeout
        return found


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes where everybody waits, and only there."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(test())


def now() -> float:
    return asyncio.get_running_loop().time()


class Noted:
    """A timer whose calls are noted with their times."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float]] = []
        self.timer = IdleTimer(lambda: self.calls.append(("ring", now())))

    def start(self, playing_seconds: float, idle_seconds: float) -> None:
        self.timer.start(playing_seconds, idle_seconds, lambda: self.calls.append(("silent", now())))


def test_the_timer_waits_for_the_reply_s_end_then_for_the_user_and_rings_once() -> None:
    async def test() -> None:
        noted = Noted()
        noted.start(3, 5)
        await asyncio.sleep(100)
        assert noted.calls == [("silent", pytest.approx(3)), ("ring", pytest.approx(8))]

    run(test)


@pytest.mark.parametrize(("stopped_at", "calls"), [(2, []), (7, ["silent"])])
def test_a_timer_that_is_stopped_rings_no_more(stopped_at: int, calls: list[str]) -> None:
    async def test() -> None:
        noted = Noted()
        noted.start(3, 5)
        await asyncio.sleep(stopped_at)
        noted.timer.stop()
        await asyncio.sleep(100)
        assert [name for name, _ in noted.calls] == calls

    run(test)


def test_a_timer_that_is_started_again_begins_anew() -> None:
    async def test() -> None:
        noted = Noted()
        for _ in range(3):
            noted.calls.clear()
            noted.start(3, 5)
            await asyncio.sleep(7)
        await asyncio.sleep(100)
        assert noted.calls == [("silent", pytest.approx(17)), ("ring", pytest.approx(22))]

    run(test)


class Said(Endless):
    """A reply of two seconds."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._deltas: list[Delta] = [TextDelta("Hello?"), AudioDelta(np.zeros(48_000, np.float32))]

    async def __anext__(self) -> Delta:
        if self.request.prefill_only:
            return await super().__anext__()
        if not self._deltas:
            raise StopAsyncIteration
        return self._deltas.pop(0)


def append(session: Connection, samples: Any) -> None:
    session.send("input_audio_buffer.append", audio=base64.b64encode(samples.astype("<i2").tobytes()).decode())


def silence(seconds: float) -> Any:
    return np.zeros(int(seconds * RATE), np.int16)


def test_a_silence_after_a_reply_becomes_an_item_and_is_answered() -> None:
    servers = Asked(Said)

    async def test() -> None:
        async with connected(servers, format={"type": "audio/pcm", "rate": RATE}, turn_detection=VAD) as session:
            await session.asked("response.create", "response.done")
            begin = now()
            await asyncio.sleep(1)  # the reply still plays
            append(session, silence(1))
            await asyncio.sleep(2)
            append(session, silence(0.5))
            rung = await session.until("input_audio_buffer.timeout_triggered")
            assert now() - begin == pytest.approx(2 + 5, abs=0.1)
            assert (rung["audio_start_ms"], rung["audio_end_ms"]) == (1000, 1500)
            added = await session.until("conversation.item.added")
            assert (added["item"]["id"], added["item"]["role"]) == (rung["item_id"], "user")
            assert [part["type"] for part in added["item"]["content"]] == ["input_audio"]
            assert (await session.until("response.done"))["response"]["status"] == "completed"

    run(test)
    sounds = servers.streams[-1].request.media
    assert [soundfile.info(io.BytesIO(sound)).duration for sound in sounds] == [0.5]


@pytest.mark.parametrize("sent", [True, False])
def test_a_silence_of_which_no_sound_is_left_is_answered_and_no_item(sent: bool) -> None:
    servers = Asked(Said)

    async def test() -> None:
        async with connected(servers, format={"type": "audio/pcm", "rate": RATE}, turn_detection=VAD) as session:
            await session.asked("response.create", "response.done")
            await asyncio.sleep(3)
            if sent:
                append(session, silence(1))
                await session.asked("input_audio_buffer.clear", "input_audio_buffer.cleared")
            await session.until("input_audio_buffer.timeout_triggered")
            assert (await session.until("response.done"))["response"]["status"] == "completed"

    run(test)
    asked = servers.streams[-1].request
    assert list(asked.media) == []
    assert [message["role"] for message in asked.messages or ()] == ["assistant"]


async def _speak(session: Connection) -> None:
    append(session, speech(1))  # at 16 kHz it is slow speech
    await session.until("input_audio_buffer.speech_started")


async def _commit(session: Connection) -> None:
    append(session, silence(1))
    await session.asked("input_audio_buffer.commit", "conversation.item.done")


async def _switch_off(session: Connection) -> None:
    off = {"type": "realtime", "audio": {"input": {"turn_detection": {"type": "server_vad"}}}}
    await session.asked("session.update", "session.updated", session=off)


@pytest.mark.parametrize("act", [_speak, _commit, _switch_off], ids=["speech", "commit", "update"])
@pytest.mark.parametrize("seconds", [1, 6], ids=["while it plays", "afterwards"])
def test_who_is_not_silent_is_not_asked_again(act: Callable[[Connection], Awaitable[None]], seconds: int) -> None:
    servers = Asked(Said)

    async def test() -> None:
        async with connected(servers, format={"type": "audio/pcm", "rate": RATE}, turn_detection=VAD) as session:
            await session.asked("response.create", "response.done")
            await asyncio.sleep(seconds)
            await act(session)
            await asyncio.sleep(100)
            assert "input_audio_buffer.timeout_triggered" not in [event["type"] for event in session.told]

    run(test)
    assert len([stream for stream in servers.streams if not stream.request.prefill_only]) == 1
