# SPDX-License-Identifier: Apache-2.0
"""Realtime transcription sessions: each turn is written down, and nothing is answered."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import soundfile

from client_fakes import FakeTriton, chunk, failure, final, inputs_of, parameters_of, serve_grpc
from gateway_fakes import MODEL, RunningGateway, run_gateway
from realtime_client import MANUAL, WHOLE, Talk, chat_of, noise, speech, talk
from triton_omni_gateway.realtime.limits import RealtimeLimits

EVENT = "conversation.item.input_audio_transcription"
BY_HAND: dict[str, Any] = {"type": "transcription", **{"audio": MANUAL["audio"]}}
SILENCE = np.zeros(24_000, np.int16)
BUSY = "all 8 sessions are in use [omni:overloaded;retry_after_ms=1]"


def recogniser(_request: Any, _context: Any) -> Iterator[Any]:
    yield chunk(text="What is ")
    yield chunk(text="the sea?")
    yield chunk(info=WHOLE)
    yield final()


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton(recogniser)) as fake:
        yield fake


async def test_turns_are_found_and_written_down(triton: FakeTriton, gateway: RunningGateway) -> None:
    """As LiveKit opens it: its address names a model of OpenAI's."""
    transcription = {"model": "gpt-transcribe", "languages": ["en", "de"], "keywords": ["sea"]}
    async with talk(gateway.base, model="gpt-transcribe", intent="transcription") as session:
        created = session.seen[0].session
        assert (created.type, created.object) == ("transcription", "realtime.transcription_session")
        assert created.audio.input.turn_detection.type == "server_vad"
        asked = {"type": "transcription", "audio": {"input": {"transcription": transcription}}}
        await session.asked("session.update", "session.updated", session=asked)
        session.seen.clear()
        await session.append(np.concatenate([SILENCE, speech(1), SILENCE]))
        told = await session.until(f"{EVENT}.completed")
        assert session.joined(f"{EVENT}.delta") == told.transcript == "What is the sea?"
        assert session.types() == [
            "input_audio_buffer.speech_started",
            "input_audio_buffer.speech_stopped",
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
            f"{EVENT}.completed",
        ]
    (request,) = triton.requests
    assert "priority" not in parameters_of(request)
    text = chat_of(request)[-1]["content"][-1]["text"]
    assert text == "Write down what is said, word by word.\n\nThese words may be said: sea."


async def test_turns_that_the_client_ends(triton: FakeTriton, gateway: RunningGateway) -> None:
    """As Pipecat opens it: its address names no model."""
    async with talk(gateway.base, model="", intent="transcription", **BY_HAND) as session:
        await session.append(noise(3))
        await session.asked("input_audio_buffer.commit", f"{EVENT}.completed")
    assert len(triton.requests) == 1


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a response": ("response.create", {}, "type"),
    "a text": ("conversation.item.create", {"item": {"type": "message", "role": "user"}}, "type"),
    "another type": ("session.update", {"session": {"type": "realtime"}}, "session.type"),
    "a voice": (
        "session.update",
        {"session": {"type": "transcription", "audio": {"output": {"voice": "Ethan"}}}},
        "session.audio.output",
    ),
    "too many words": (
        "session.update",
        {"session": {"type": "transcription", "audio": {"input": {"transcription": {"keywords": ["x"] * 2000}}}}},
        "session.audio.input.transcription.keywords",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_is_no_transcription_is_refused_by_name(gateway: RunningGateway, case: str) -> None:
    kind, fields, param = REFUSED[case]
    async with talk(gateway.base, intent="transcription", **BY_HAND) as session:
        assert (await session.refused(kind, **fields)).param == param
        await session.append(noise(0.5))
        await session.asked("input_audio_buffer.commit", f"{EVENT}.completed")


async def test_other_sessions_stay_as_they_are(gateway: RunningGateway) -> None:
    async with talk(gateway.base) as session:
        assert (await session.refused("session.update", session=BY_HAND)).param == "session.type"


async def test_a_client_secret_decides(gateway: RunningGateway) -> None:
    made = gateway.openai.realtime.client_secrets.create(session=BY_HAND)  # type: ignore[arg-type]
    assert (made.session.type, made.session.object) == ("transcription", "realtime.transcription_session")
    async with talk(gateway.base, key=made.value) as session:
        assert session.seen[0].session.audio.input.turn_detection is None
        await session.append(noise(0.5))
        await session.asked("input_audio_buffer.commit", f"{EVENT}.completed")
    usual = gateway.openai.realtime.client_secrets.create()
    async with talk(gateway.base, key=usual.value, intent="transcription") as session:
        assert session.seen[0].session.model == MODEL


class Waiting:
    """Writes nothing down before it may."""

    def __init__(self) -> None:
        self.may = threading.Event()

    def __call__(self, request: Any, context: Any) -> Iterator[Any]:
        while not self.may.wait(0.01):
            if not context.is_active():
                return
        yield from recogniser(request, context)


async def commit(session: Talk) -> str:
    """The id of the next half second of sound."""
    await session.append(noise(0.5))
    done = await session.asked("input_audio_buffer.commit", "conversation.item.done")
    return str(done.item.id)


async def test_what_waits_goes_with_its_item(triton: FakeTriton) -> None:
    """So that a flood of turns is as bounded as the conversation: by the third, the oldest goes."""
    triton.script = waiting = Waiting()
    with run_gateway(triton.url, realtime=RealtimeLimits(max_items=2)) as gateway:
        async with talk(gateway.base, intent="transcription", **BY_HAND) as session:
            first, second = await commit(session), await commit(session)
            third = await commit(session)
            failed = await session.until(f"{EVENT}.failed")
            assert (failed.item_id, failed.error.code) == (first, "item_deleted")
            await session.asked("conversation.item.delete", f"{EVENT}.failed", item_id=second)
            waiting.may.set()
            assert (await session.until(f"{EVENT}.completed")).item_id == third


async def test_a_long_turn_is_heard_in_windows_as_a_recording_is(triton: FakeTriton) -> None:
    """A later window that finds no free session is asked for again; the seconds are counted."""
    refused: set[str] = set()

    def script(request: Any, _context: Any) -> Iterator[Any]:
        number = int(request.id.partition(".")[2] or 0)
        if number and request.id not in refused:
            refused.add(request.id)
            yield failure(BUSY)
        else:
            yield from (chunk(text=["The sea", " is deep", "and wide."][number]), chunk(info=WHOLE), final())

    triton.script = script
    with run_gateway(triton.url, window_seconds=1.5, windows_at_once=2) as gateway:
        async with talk(gateway.base, intent="transcription", **BY_HAND) as session:
            await session.append(noise(4))
            completed = await session.asked("input_audio_buffer.commit", f"{EVENT}.completed")
        await asyncio.to_thread(gateway.wait_for_metric, "omni_gateway_recording_seconds_total", 4)
    assert session.joined(f"{EVENT}.delta") == completed.transcript == "The sea is deep and wide."
    assert completed.usage.total_tokens == 3 * 12
    labels = [completed.item_id, f"{completed.item_id}.1", f"{completed.item_id}.2"]
    assert refused == set(labels[1:])
    heard = {
        request.id: soundfile.info(io.BytesIO(inputs_of(request)["media"][0])).duration for request in triton.requests
    }
    assert sorted(heard) == labels
    assert max(heard.values()) <= 1.5
    assert sum(heard.values()) == pytest.approx(4)


@pytest.mark.parametrize(
    ("settings", "answer", "code", "what"),
    [
        ({}, failure(BUSY), "overloaded", "all 8 sessions are in use"),
        ({"window_seconds": 1, "max_recording_seconds": 2}, chunk(text="x"), "invalid_file", "longer than 2 seconds"),
    ],
)
async def test_what_cannot_be_written_down_is_told_and_not_counted(
    triton: FakeTriton, settings: dict[str, Any], answer: Any, code: str, what: str
) -> None:
    triton.script = lambda *_: iter([answer, final()])
    with run_gateway(triton.url, **settings) as gateway:
        async with talk(gateway.base, intent="transcription", **BY_HAND) as session:
            await session.append(noise(4))
            failed = await session.asked("input_audio_buffer.commit", f"{EVENT}.failed")
            assert (failed.error.code, what in failed.error.message) == (code, True)
            assert failed.error.param in (None, f"{failed.item_id}.content[0]")
            triton.script = recogniser
            await session.append(noise(0.5))
            await session.asked("input_audio_buffer.commit", f"{EVENT}.completed")
        await asyncio.to_thread(gateway.wait_for_metric, "omni_gateway_recording_seconds_total", 0.5)
