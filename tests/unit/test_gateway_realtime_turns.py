# SPDX-License-Identifier: Apache-2.0
"""Realtime sessions whose gateway hears when the user speaks: turns, interruptions, long pauses, sound sent ahead."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import soundfile

from client_fakes import FakeTriton, chunk, failure, final, inputs_of, parameters_of
from gateway_fakes import TIMEOUT_S, RunningGateway, run_gateway
from realtime_client import MANUAL, WHOLE, chat_of, greeting, noise, speech, talk
from triton_omni_client.listening import HEARD_RATE, REACH, WINDOW
from triton_omni_gateway.realtime.limits import RealtimeLimits

RATE = 24_000
SILENCE = np.zeros(RATE, np.int16)


def vad(**options: Any) -> dict[str, Any]:
    return {"input": {"turn_detection": {"type": "server_vad", **options}}}


def hints_of(triton: FakeTriton) -> list[Any]:
    """Requests that only prefill; where two requests are under way, either may come first."""
    return [request for request in triton.requests if parameters_of(request).get("prefill_only")]


def asked_of(triton: FakeTriton) -> list[Any]:
    """All others."""
    return [request for request in triton.requests if not parameters_of(request).get("prefill_only")]


async def test_a_session_that_says_nothing_is_listened_to(triton: FakeTriton, gateway: RunningGateway) -> None:
    async with talk(gateway.base) as session:
        assert session.seen[0].session.audio.input.turn_detection.type == "server_vad"
        await session.append(np.concatenate([SILENCE, speech(2), SILENCE]))
        done = (await session.until("response.done")).response
        kinds = [kind for kind in session.types() if not kind.startswith("response")]
    assert done.status == "completed"
    assert kinds == [
        "session.created",
        "input_audio_buffer.speech_started",
        "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
        "rate_limits.updated",
        "conversation.item.added",
        "conversation.item.done",
    ]
    started, stopped, committed = (event for event in session.seen if event.type.startswith("input_audio_buffer"))
    assert {started.item_id, stopped.item_id, committed.item_id} == {committed.item_id}
    heard, rate = soundfile.read(io.BytesIO(inputs_of(asked_of(triton)[0])["media"][0]))
    assert len(heard) * 1000 // rate == stopped.audio_end_ms - started.audio_start_ms


async def test_a_user_who_speaks_cancels_the_response_on_the_server(
    triton: FakeTriton, gateway: RunningGateway
) -> None:
    triton.script = triton.endless
    async with talk(gateway.base, audio=vad()) as session:
        await session.say("Tell me a story.")
        await session.send("response.create")
        await session.until("response.output_audio.delta")
        await session.append(speech(1))
        done = (await session.until("response.done")).response
        assert await asyncio.to_thread(triton.cancelled.wait, TIMEOUT_S)
        kinds = session.types()
        assert kinds.index("input_audio_buffer.speech_started") < kinds.index("response.done")
        cut = {"item_id": done.output[0].id, "content_index": 0, "audio_end_ms": 10}
        await session.asked("conversation.item.truncate", "conversation.item.truncated", **cut)
        triton.script = greeting
        await session.append(SILENCE)
        assert (await session.until("response.done")).response.status == "completed"
    assert (done.status, done.status_details.reason) == ("cancelled", "turn_detected")
    assert [message["role"] for message in chat_of(asked_of(triton)[-1])] == ["user", "user"]


async def test_a_session_may_keep_its_responses_for_itself(triton: FakeTriton, gateway: RunningGateway) -> None:
    async with talk(gateway.base, audio=vad(create_response=False)) as session:
        await session.append(np.concatenate([speech(1), SILENCE]))
        await session.until("conversation.item.done")
        assert (await session.asked("response.create", "response.done")).response.status == "completed"
    assert len(asked_of(triton)) == 1


async def test_a_response_may_go_on_while_the_user_speaks(triton: FakeTriton, gateway: RunningGateway) -> None:
    triton.script = triton.endless
    async with talk(gateway.base, audio=vad(interrupt_response=False)) as session:
        await session.say("Tell me a story.")
        await session.send("response.create")
        await session.until("response.output_audio.delta")
        await session.append(np.concatenate([speech(1), SILENCE]))
        await session.until("conversation.item.done", previous_item_id=session.seen[-1].item_id)
        assert "response.done" not in session.types()
        assert (await session.asked("response.cancel", "response.done")).response.status == "cancelled"


async def test_who_speaks_without_a_pause_is_answered_when_no_more_can_wait(triton: FakeTriton) -> None:
    with run_gateway(triton.url, realtime=RealtimeLimits(max_buffer_seconds=3)) as gateway:
        async with talk(gateway.base, audio=vad(silence_duration_ms=60_000, interrupt_response=False)) as session:
            for _ in range(2):
                await session.append(speech(1.6))
            assert (await session.until("response.done")).response.status == "completed"
            assert session.types().count("input_audio_buffer.speech_stopped") == 1
            assert (await session.refused("input_audio_buffer.append", audio=LONG)).code == "input_audio_buffer_full"
            assert session.types().count("input_audio_buffer.speech_stopped") == 1
    heard, rate = soundfile.read(io.BytesIO(inputs_of(asked_of(triton)[0])["media"][0]))
    assert len(heard) / rate == pytest.approx(1.6, abs=0.1)


async def test_padding_leaves_room_for_speech_in_the_buffer(triton: FakeTriton) -> None:
    """Nobody speaks, and the buffer is never full, however much sound comes."""
    key = "session.audio.input.turn_detection.prefix_padding_ms"
    with run_gateway(triton.url, realtime=RealtimeLimits(max_buffer_seconds=3)) as gateway:
        for padding in (1501, 10_000_000):
            wrong = {"type": "realtime", "audio": vad(prefix_padding_ms=padding)}
            with pytest.raises(openai.BadRequestError, match=f"'{key}': {padding} is over 1500, half"):
                gateway.openai.realtime.client_secrets.create(session=wrong)  # type: ignore[arg-type]
            async with talk(gateway.base) as session:
                error = await session.refused("session.update", session=wrong)
                assert (error.param, error.code) == (key, "invalid_value")
        async with talk(gateway.base, audio=vad(prefix_padding_ms=1500)) as session:
            for _ in range(8):
                await session.append(SILENCE)
            for part in np.array_split(np.concatenate([speech(0.8), SILENCE]), 9):
                await session.append(part)
            assert (await session.until("response.done")).response.status == "completed"
    heard, rate = soundfile.read(io.BytesIO(inputs_of(asked_of(triton)[0])["media"][0]))
    assert 2.5 <= len(heard) / rate <= 3.1


LONG = base64.b64encode(bytes(4 * 2 * RATE)).decode()
NO_CACHE = "prefill_only: this deployment has no prefix cache [omni:bad_request;stage=thinker]"


def prefilling(request: Any, context: Any) -> Iterator[Any]:
    if parameters_of(request).get("prefill_only"):
        yield chunk(info={**WHOLE, "finish_reason": {"thinker": "prefilled"}})
        yield final()
    else:
        yield from greeting(request, context)


async def test_sound_is_computed_while_it_comes(triton: FakeTriton, gateway: RunningGateway) -> None:
    triton.script = prefilling
    async with talk(gateway.base, audio=MANUAL["audio"]) as session:
        await session.say("Listen to this.")
        await session.append(noise(2.5))
        while not triton.requests:
            await asyncio.sleep(0.01)
        await session.append(noise(0.5))
        await session.asked("input_audio_buffer.commit", "conversation.item.done")
        await session.asked("response.create", "response.done")
    (hint,), (asked,) = hints_of(triton), asked_of(triton)
    assert (parameters_of(hint)["prefill_only"], parameters_of(hint)["priority"]) == (True, 1)
    assert parameters_of(hint)["cache_salt"] == parameters_of(asked)["cache_salt"]
    assert chat_of(hint) == chat_of(asked)
    first, _ = soundfile.read(io.BytesIO(inputs_of(hint)["media"][0]), dtype="int16")
    whole, _ = soundfile.read(io.BytesIO(inputs_of(asked)["media"][0]), dtype="int16")
    assert len(first) == WINDOW + REACH
    np.testing.assert_array_equal(first, whole[: len(first)])
    assert len(whole) == pytest.approx(3 * HEARD_RATE, abs=2)


async def test_speech_is_computed_from_where_it_begins(triton: FakeTriton, gateway: RunningGateway) -> None:
    triton.script = prefilling
    async with talk(gateway.base, audio=vad()) as session:
        await session.append(np.concatenate([SILENCE, speech(3), SILENCE]))
        await session.until("response.done")
    (hint,), (asked,) = hints_of(triton), asked_of(triton)
    first, _ = soundfile.read(io.BytesIO(inputs_of(hint)["media"][0]), dtype="int16")
    whole, _ = soundfile.read(io.BytesIO(inputs_of(asked)["media"][0]), dtype="int16")
    np.testing.assert_array_equal(first, whole[: len(first)])


async def test_a_server_without_caches_is_hinted_to_once(triton: FakeTriton, gateway: RunningGateway) -> None:
    refused = threading.Event()

    def script(request: Any, context: Any) -> Iterator[Any]:
        if parameters_of(request).get("prefill_only"):
            try:
                yield failure(NO_CACHE)
            finally:
                refused.set()
        else:
            yield from greeting(request, context)

    triton.script = script
    async with talk(gateway.base, audio=MANUAL["audio"]) as session:
        for _ in range(2):
            await session.append(noise(4.5))
            assert await asyncio.to_thread(refused.wait, TIMEOUT_S)  # before the reply
            await session.asked("input_audio_buffer.commit", "conversation.item.done")
            await session.asked("response.create", "response.done")
    assert len(hints_of(triton)) == 1


async def test_an_utterance_that_is_refused_as_too_long_is_not_the_last_that_is_sent_ahead(
    triton: FakeTriton, gateway: RunningGateway
) -> None:
    def script(request: Any, context: Any) -> Iterator[Any]:
        if parameters_of(request).get("prefill_only"):
            yield failure("the prompt has 40000 tokens, the limit is 32767 [omni:too_large;stage=thinker]")
        else:
            yield from greeting(request, context)

    triton.script = script
    async with talk(gateway.base, audio=MANUAL["audio"]) as session:
        for number in range(2):
            await session.append(noise(2.5))
            while len(hints_of(triton)) == number:
                await asyncio.sleep(0.01)
            await session.asked("input_audio_buffer.commit", "conversation.item.done")
            await session.asked("response.create", "response.done")
    assert len(hints_of(triton)) == 2


async def test_sound_that_is_cleared_is_forgotten(triton: FakeTriton, gateway: RunningGateway) -> None:
    async with talk(gateway.base, audio=MANUAL["audio"]) as session:
        await session.append(noise(1))
        await session.asked("input_audio_buffer.clear", "input_audio_buffer.cleared")
        assert (await session.refused("input_audio_buffer.commit")).code == "input_audio_buffer_commit_empty"
        await session.append(noise(0.25))
        await session.asked("input_audio_buffer.commit", "conversation.item.done")
        await session.asked("response.create", "response.done")
    heard, _ = soundfile.read(io.BytesIO(inputs_of(asked_of(triton)[0])["media"][0]))
    assert len(heard) == pytest.approx(4000, abs=2)


async def test_what_is_not_installed_is_refused_with_its_cure(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton_omni_gateway.realtime.detection.is_installed", lambda: False)
    async with talk(gateway.base) as session:
        assert session.seen[0].session.audio.input.turn_detection is None
        error = await session.refused("session.update", session={"type": "realtime", "audio": vad()})
    assert error.param == "session.audio.input.turn_detection.type"
    assert "pip install 'triton-omni-gateway[realtime]'" in error.message


def recogniser(request: Any, context: Any) -> Iterator[Any]:
    """Writes down what it is asked to, and answers all else."""
    if any("Write down" in part["text"] for part in chat_of(request)[-1]["content"] if part["type"] == "text"):
        yield chunk(text="What is ")
        yield chunk(text="the sea?")
        yield chunk(info=WHOLE)
        yield final()
    else:
        yield from greeting(request, context)


async def test_what_the_user_says_is_written_down_beside_the_reply(triton: FakeTriton, gateway: RunningGateway) -> None:
    triton.script = recogniser
    transcription = {"model": "whisper-1", "language": "en", "prompt": "It is about water."}
    detection = vad()["input"]
    async with talk(gateway.base, audio={"input": {**detection, "transcription": transcription}}) as session:
        await session.append(np.concatenate([speech(1), SILENCE]))
        prefix = "conversation.item.input_audio_transcription"
        completed = await session.until(f"{prefix}.completed")
        assert session.joined(f"{prefix}.delta") == completed.transcript == "What is the sea?"
        assert completed.usage.input_tokens == 9
        if "response.done" not in session.types():
            await session.until("response.done")
        told = await session.asked(
            "conversation.item.retrieve", "conversation.item.retrieved", item_id=completed.item_id
        )
    assert told.item.content[0].transcript == "What is the sea?"
    asked, written = sorted(asked_of(triton), key=lambda request: "priority" in parameters_of(request))
    assert (parameters_of(written)["modalities"], parameters_of(written)["priority"]) == (["text"], 1)
    assert inputs_of(written)["media"] == inputs_of(asked)["media"]
    text = chat_of(written)[-1]["content"][-1]["text"]
    assert text == "Write down what is said, word by word.\n\nIt is about water."


async def test_a_transcription_that_fails_is_told_and_the_reply_comes(
    triton: FakeTriton, gateway: RunningGateway
) -> None:
    def script(request: Any, context: Any) -> Iterator[Any]:
        if parameters_of(request).get("priority") == 1:
            yield failure("no free session [omni:overloaded;stage=thinker;retry_after_ms=250]")
        else:
            yield from greeting(request, context)

    triton.script = script
    listening = {"input": {"turn_detection": None, "transcription": {"model": "whisper-1"}}}
    async with talk(gateway.base, audio=listening) as session:
        await session.append(noise(0.5))
        failed = await session.asked("input_audio_buffer.commit", "conversation.item.input_audio_transcription.failed")
        assert (failed.error.code, failed.content_index) == ("overloaded", 0)
        assert (await session.asked("response.create", "response.done")).response.status == "completed"


async def test_a_turn_ends_with_its_sentence(
    triton: FakeTriton, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pause is in the middle of a sentence, the second at its end."""
    told: list[int] = []

    async def is_over(_self: Any, pcm: bytes) -> bool:
        told.append(len(pcm))
        return len(told) == 2

    monkeypatch.setattr("triton_omni_gateway.realtime.smart_turn.SmartTurn.is_over", is_over)
    detection = {"input": {"turn_detection": {"type": "semantic_vad", "eagerness": "low"}}}
    async with talk(gateway.base, audio=detection) as session:
        pause = SILENCE[: RATE * 2 // 5]
        await session.append(np.concatenate([speech(1), pause, speech(1), pause, SILENCE]))
        assert (await session.until("response.done")).response.status == "completed"
        kinds = session.types()
    assert [kinds.count(f"input_audio_buffer.{kind}") for kind in ("speech_started", "speech_stopped")] == [1, 1]
    assert len(told) == 2
    assert told[0] < told[1]


async def test_a_turn_that_seems_unfinished_ends_after_the_longest_pause(
    triton: FakeTriton, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_over(_self: Any, _pcm: bytes) -> bool:
        return False

    monkeypatch.setattr("triton_omni_gateway.realtime.smart_turn.SmartTurn.is_over", is_over)
    detection = {"input": {"turn_detection": {"type": "semantic_vad", "eagerness": "high"}}}
    async with talk(gateway.base, audio=detection) as session:
        await session.append(np.concatenate([speech(1), SILENCE, SILENCE, SILENCE]))
        started = await session.until("input_audio_buffer.speech_started")
        stopped = await session.until("input_audio_buffer.speech_stopped")
        assert 2900 <= stopped.audio_end_ms - started.audio_start_ms <= 3300
