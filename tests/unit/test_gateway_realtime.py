# SPDX-License-Identifier: Apache-2.0
"""Realtime sessions, by OpenAI's client: turns that the client commits itself."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import soundfile

from client_fakes import FakeTriton, chunk, failure, final, inputs_of, parameters_of, tell
from gateway_fakes import MODEL, TIMEOUT_S, RunningGateway, run_gateway
from media_samples import image_file
from realtime_client import MANUAL, WHOLE, Talk, chat_of, greeting, noise, talk
from triton_omni.thinker.prompt import DEFAULT_SYSTEM_PROMPT

MANUAL_AUDIO = MANUAL["audio"]
TEXT = {"output_modalities": ["text"], "audio": MANUAL_AUDIO}


async def test_a_written_question_is_answered_in_text(triton: FakeTriton, gateway: RunningGateway) -> None:
    async with talk(gateway.base, **TEXT, instructions="Be brief.", max_output_tokens=20) as session:
        await session.say("What is the sea?")
        session.seen.clear()
        done = await session.asked("response.create", "response.done")
        assert session.types() == [
            "response.created",
            "rate_limits.updated",
            "response.output_item.added",
            "conversation.item.added",
            "response.content_part.added",
            "response.output_text.done",
            "response.content_part.done",
            "conversation.item.done",
            "response.output_item.done",
            "response.done",
        ]
        assert session.joined("response.output_text.delta") == "Hello, sea."
    assert (done.response.status, done.response.output[0].content[0].text) == ("completed", "Hello, sea.")
    assert done.response.usage.input_tokens == 9
    assert done.response.usage.input_token_details.image_tokens == 5
    asked = triton.requests[-1]
    assert chat_of(asked) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is the sea?"}]},
    ]
    parameters = parameters_of(asked)
    assert (parameters["modalities"], parameters["thinker"]) == (["text"], {"max_tokens": 20})


async def test_a_spoken_question_is_answered_in_speech(triton: FakeTriton, gateway: RunningGateway) -> None:
    said = noise(0.5)
    async with talk(gateway.base, audio={**MANUAL_AUDIO, "output": {"voice": "Ethan"}}) as session:
        for piece in np.array_split(said, 7):
            await session.append(piece)
        session.seen.clear()
        await session.asked("input_audio_buffer.commit", "conversation.item.done")
        assert session.types() == [
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
        ]
        assert len({session.seen[0].item_id, session.seen[1].item.id}) == 1
        done = (await session.asked("response.create", "response.done")).response
        sound = np.frombuffer(session.heard(), "<i2")
        assert session.joined("response.output_audio_transcript.delta") == "Hello, sea."
    assert done.output[0].content[0].transcript == "Hello, sea."
    assert (len(sound), sound[0], sound[-1]) == (960, 8192, -16384)
    asked = triton.requests[-1]
    assert parameters_of(asked)["voice"] == "Ethan"
    assert parameters_of(asked)["audio_in_pieces"] is True
    heard, rate = soundfile.read(io.BytesIO(inputs_of(asked)["media"][0]))
    assert rate == 16_000
    assert len(heard) == pytest.approx(8000, abs=2)


async def test_the_next_prompt_holds_all_turns_and_one_salt(triton: FakeTriton, gateway: RunningGateway) -> None:
    async with talk(gateway.base, **TEXT) as session:
        for text in ("One?", "Two?"):
            await session.say(text)
            await session.asked("response.create", "response.done")
    texts = [message["content"] for message in chat_of(triton.requests[1])]
    assert texts == [[{"type": "text", "text": "One?"}], "Hello, sea.", [{"type": "text", "text": "Two?"}]]
    assert len({parameters_of(request)["cache_salt"] for request in triton.requests}) == 1


async def test_a_picture_is_shown(triton: FakeTriton, gateway: RunningGateway) -> None:
    picture = image_file("png")
    url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "What is this?"}]
    item = {"type": "message", "role": "user", "content": parts}
    async with talk(gateway.base, **TEXT) as session:
        shown = (await session.asked("conversation.item.create", "conversation.item.done", item=item)).item
        told = await session.asked("conversation.item.retrieve", "conversation.item.retrieved", item_id=shown.id)
        await session.asked("response.create", "response.done")
    assert told.item.content[0].image_url == url
    assert inputs_of(triton.requests[0])["media"] == [picture]
    assert chat_of(triton.requests[0])[0]["content"] == [{"type": "image"}, {"type": "text", "text": "What is this?"}]


async def test_speech_may_be_faster_and_is_cut_where_it_was_heard(triton: FakeTriton, gateway: RunningGateway) -> None:
    def story(_request: Any, _context: Any) -> Iterator[Any]:
        yield chunk(text="word " * 9 + "word")
        for _ in range(10):
            yield chunk(audio=np.zeros(24_000, np.float32))
        yield chunk(info={**WHOLE, "usage": {**WHOLE["usage"], "samples": 240_000}})  # type: ignore[dict-item]
        yield final()

    triton.script = story
    async with talk(gateway.base, audio={**MANUAL_AUDIO, "output": {"speed": 1.25}}) as session:
        await session.say("Tell me a story.")
        item = (await session.asked("response.create", "response.done")).response.output[0]
        assert len(session.heard()) == pytest.approx(8 * 48_000, rel=0.01)
        cut = {"item_id": item.id, "content_index": 0, "audio_end_ms": 4000}
        await session.asked("conversation.item.truncate", "conversation.item.truncated", **cut)
        told = await session.asked("conversation.item.retrieve", "conversation.item.retrieved", item_id=item.id)
        assert told.item.content[0].transcript == " ".join(["word"] * 5)
        slow = {"type": "realtime", "audio": {"output": {"speed": 0.1}}}
        assert (await session.refused("session.update", session=slow)).param == "session.audio.output.speed"


async def test_a_running_response_is_cancelled_on_the_server(triton: FakeTriton, gateway: RunningGateway) -> None:
    triton.script = triton.endless
    async with talk(gateway.base, audio=MANUAL_AUDIO) as session:
        await session.say("Tell me a story.")
        await session.send("response.create")
        await session.until("response.output_audio.delta")
        error = await session.refused("response.create")
        assert error.code == "conversation_already_has_active_response"
        done = (await session.asked("response.cancel", "response.done")).response
        assert await asyncio.to_thread(triton.cancelled.wait, TIMEOUT_S)
        assert (await session.refused("response.cancel")).code == "response_cancel_not_active"
    assert (done.status, done.status_details.reason) == ("cancelled", "client_cancelled")
    assert done.output[0].status == "incomplete"


async def test_the_next_prompt_holds_only_what_was_heard(triton: FakeTriton, gateway: RunningGateway) -> None:
    """Ten words in ten seconds of speech, of which half is heard."""

    def story(_request: Any, _context: Any) -> Iterator[Any]:
        yield chunk(text="word " * 9 + "word")
        for _ in range(10):
            yield chunk(audio=np.zeros(24_000, np.float32))
        yield chunk(info={**WHOLE, "usage": {**WHOLE["usage"], "samples": 240_000}})  # type: ignore[dict-item]
        yield final()

    triton.script = story
    async with talk(gateway.base, audio=MANUAL_AUDIO) as session:
        await session.say("Tell me a story.")
        item = (await session.asked("response.create", "response.done")).response.output[0]
        cut = {"item_id": item.id, "content_index": 0}
        error = await session.refused("conversation.item.truncate", **cut, audio_end_ms=10_001)
        assert (error.param, "10000" in error.message) == ("audio_end_ms", True)
        await session.asked("conversation.item.truncate", "conversation.item.truncated", **cut, audio_end_ms=5000)
        told = await session.asked("conversation.item.retrieve", "conversation.item.retrieved", item_id=item.id)
        assert told.item.content[0].transcript == " ".join(["word"] * 5)
        await session.asked("response.create", "response.done")
    assert chat_of(triton.requests[1])[-1] == {"role": "assistant", "content": " ".join(["word"] * 5)}


async def test_items_are_put_and_deleted_anywhere(triton: FakeTriton, gateway: RunningGateway) -> None:
    def message(text: str, role: str = "user", **fields: Any) -> dict[str, Any]:
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}], **fields}

    async with talk(gateway.base, **TEXT) as session:
        await session.asked("conversation.item.create", "conversation.item.done", item=message("b", id="b"))
        first = {"item": message("a", "assistant", id="a"), "previous_item_id": "root"}
        await session.asked("conversation.item.create", "conversation.item.done", **first)
        after = {"item": message("c", "system", id="c"), "previous_item_id": "a"}
        added = await session.asked("conversation.item.create", "conversation.item.done", **after)
        assert added.previous_item_id == "a"
        await session.asked("conversation.item.delete", "conversation.item.deleted", item_id="a")
        assert (await session.refused("conversation.item.delete", item_id="a")).code == "item_not_found"
        taken = await session.refused("conversation.item.create", item=message("d", id="b"))
        assert taken.param == "item.id"
        await session.asked("response.create", "response.done")
    assert [one["role"] for one in chat_of(triton.requests[0])] == ["system", "user"]


async def test_items_go_into_another_session_as_openai_s_client_dumps_them(
    triton: FakeTriton, gateway: RunningGateway
) -> None:
    """With null for each key of their types that an item does not have, and without content where nothing was said."""
    async with talk(gateway.base, audio=MANUAL_AUDIO) as session:
        said = await session.say("What is the sea?")
        (spoken,) = (await session.asked("response.create", "response.done")).response.output
    silent = {**spoken.model_dump(), "id": "silent", "content": []}
    async with talk(gateway.base, **TEXT) as session:
        for item in (said.model_dump(), spoken.model_dump(), silent):
            await session.asked("conversation.item.create", "conversation.item.done", item=item)
        await session.asked("response.create", "response.done")
    assert chat_of(triton.requests[1]) == [
        *chat_of(triton.requests[0])[-1:],
        {"role": "assistant", "content": "Hello, sea."},
    ]


async def test_a_response_aside_has_its_own_input_and_stays_out(triton: FakeTriton, gateway: RunningGateway) -> None:
    async with talk(gateway.base, **TEXT) as session:
        said = await session.say("My name is Molly.")
        own = [
            {"type": "item_reference", "id": said.id},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Which name?"}]},
        ]
        aside = {"conversation": "none", "input": own, "metadata": {"topic": "name"}, "instructions": "One word."}
        done = (await session.asked("response.create", "response.done", response=aside)).response
        assert (done.conversation_id, done.metadata) == (None, {"topic": "name"})
        assert "conversation.item.added" not in session.types()[-7:]
        await session.asked("response.create", "response.done")
    assert [len(chat_of(request)) for request in triton.requests] == [3, 1]


@pytest.mark.parametrize(
    ("item", "key"),
    [
        ({"type": "item_reference"}, "id"),
        ({"type": "item_reference", "id": "nowhere"}, "id"),
        ({"type": "message"}, "role"),
        ({"type": "message", "role": "user", "content": [{"type": "input_text"}]}, "content[0].text"),
        ({"type": "function_call_output", "call_id": "call_1"}, "output"),
    ],
    ids=str,
)
async def test_a_wrong_item_of_a_response_is_named_by_its_place(
    gateway: RunningGateway, item: dict[str, Any], key: str
) -> None:
    first = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Which name?"}]}
    async with talk(gateway.base, **TEXT) as session:
        error = await session.refused("response.create", response={"conversation": "none", "input": [first, item]})
    assert error.param == f"response.input[1].{key}"
    assert f"'{error.param}'" in error.message


async def test_a_conversation_of_nothing_is_begun_by_the_model(triton: FakeTriton, gateway: RunningGateway) -> None:
    """As if the server's own system prompt were given."""
    async with talk(gateway.base, **TEXT) as session:
        assert (await session.asked("response.create", "response.done")).response.status == "completed"
        aside = {"conversation": "none", "input": []}
        assert (await session.asked("response.create", "response.done", response=aside)).response.output
    chats = [chat_of(request) for request in triton.requests]
    assert chats == [[{"role": "system", "content": DEFAULT_SYSTEM_PROMPT}]] * 2


async def test_a_refused_response_fails_and_the_session_goes_on(triton: FakeTriton, gateway: RunningGateway) -> None:
    triton.script = lambda _request, _context: iter(
        [failure("voice: must be one of Chelsie, Ethan (got x) [omni:bad_request;stage=talker]")]
    )
    async with talk(gateway.base, audio={**MANUAL_AUDIO, "output": {"voice": "x"}}) as session:
        await session.say("Hello.")
        done = (await session.asked("response.create", "response.done")).response
        assert (done.status, done.output) == ("failed", [])
        assert "audio.output.voice: must be one of" in done.status_details.error.message
        triton.script = greeting
        assert (await session.asked("response.create", "response.done")).response.status == "completed"


REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "an unknown event": ("conversation.begin", {}, "type", "session.update"),
    "an unknown key": ("session.update", {"session": {"type": "realtime", "voic": "x"}}, "session.voic", "Unknown"),
    "a wrong value": (
        "session.update",
        {"session": {"type": "realtime", "audio": {"input": {"format": {"type": "audio/pcm", "rate": 44100}}}}},
        "session.audio.input.format.rate",
        "44100",
    ),
    "tools of others": (
        "session.update",
        {"session": {"type": "realtime", "tools": [{"type": "mcp", "server_label": "x"}]}},
        "session.tools[0].type",
        "'function'",
    ),
    "another model": ("session.update", {"session": {"type": "realtime", "model": "x"}}, "model", MODEL),
    "no base64": ("input_audio_buffer.append", {"audio": "§"}, "audio", "base64"),
    "no sound": ("input_audio_buffer.commit", {}, "", "100 ms"),
    "an item that is not there": ("conversation.item.retrieve", {"item_id": "x"}, "item_id", "'x'"),
    "a message without content": (
        "conversation.item.create",
        {"item": {"type": "message", "role": "user", "content": []}},
        "item.content",
        "at least one part",
    ),
    "an address of a picture": (
        "conversation.item.create",
        {
            "item": {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_image", "image_url": "https://example.org/a.png"}],
            }
        },
        "item.content[0].image_url",
        "no address is fetched",
    ),
}


async def test_wrong_events_are_refused_by_name(gateway: RunningGateway) -> None:
    async with talk(gateway.base, **TEXT) as session:
        for name, (kind, fields, param, told) in REFUSED.items():
            error = await session.refused(kind, **fields)
            assert ((error.param or ""), told in error.message) == (param, True), (name, error)
        await session.say("Still here?")
        assert (await session.asked("response.create", "response.done")).response.status == "completed"


async def test_a_long_conversation_loses_its_oldest_items(triton: FakeTriton, gateway: RunningGateway) -> None:
    rule = {"type": "retention_ratio", "retention_ratio": 0.5, "token_limits": {"post_instructions": 100}}
    async with talk(gateway.base, **TEXT, truncation=rule) as session:
        said = [(await session.say("word " * 20)).id for _ in range(4)]
        await session.asked("response.create", "response.done")
        gone = [event.item_id for event in session.seen if event.type == "conversation.item.deleted"]
    assert gone == said[:3]
    assert len(chat_of(triton.requests[0])) == 1


async def test_a_conversation_that_the_server_finds_too_long_is_shortened(
    triton: FakeTriton, gateway: RunningGateway
) -> None:
    def strict(request: Any, context: Any) -> Iterator[Any]:
        if len(chat_of(request)) > 2:
            yield failure("the prompt has 40000 tokens, the limit is 32767 [omni:bad_request;stage=thinker]")
        else:
            yield from greeting(request, context)

    triton.script = strict
    async with talk(gateway.base, **TEXT) as session:
        for number in range(4):
            await session.say(f"Number {number} is here.")
        assert (await session.asked("response.create", "response.done")).response.status == "completed"
        assert session.types().count("conversation.item.deleted") == 2
        await session.asked("session.update", "session.updated", session={"type": "realtime", "truncation": "disabled"})
        await session.say("And one more.")
        done = (await session.asked("response.create", "response.done")).response
    assert (done.status, done.status_details.error.code) == ("failed", "context_length_exceeded")


async def test_the_fortieth_spoken_turn_still_has_the_sounds_of_all(triton: FakeTriton) -> None:
    """The length of the prompt decides what is kept, no count."""
    tell(triton.configs["qwen2_5_omni"], limits={"max_media_items": 16, "max_prompt_tokens": 32_000})
    with run_gateway(triton.url) as gateway:
        async with talk(gateway.base, **TEXT) as session:
            for turn in range(40):
                await spoken(session, 0.2 + turn / 100)
                await session.asked("response.create", "response.done")
    sounds = inputs_of(triton.requests[-1])["media"]
    seconds = [soundfile.info(io.BytesIO(sound)).duration for sound in sounds]
    assert seconds == pytest.approx([0.2 + turn / 100 for turn in range(40)], abs=0.001)
    assert [message["role"] for message in chat_of(triton.requests[-1])] == ["user", "assistant"] * 39 + ["user"]


async def test_a_server_that_takes_fewer_sounds_gets_the_newest(triton: FakeTriton, gateway: RunningGateway) -> None:
    def strict(request: Any, context: Any) -> Iterator[Any]:
        if (count := len(inputs_of(request)["media"])) > 2:
            yield failure(f"media: {count} elements, the limit is 2 [omni:too_large;stage=thinker]")
        else:
            yield from greeting(request, context)

    triton.script = strict
    async with talk(gateway.base, **TEXT) as session:
        said = [await spoken(session, 0.2 + turn / 10) for turn in range(4)]
        assert (await session.asked("response.create", "response.done")).response.status == "completed"
        gone = [event.item_id for event in session.seen if event.type == "conversation.item.deleted"]
    assert gone == said[:2]
    newest = [soundfile.info(io.BytesIO(sound)).duration for sound in inputs_of(triton.requests[-1])["media"]]
    assert newest == pytest.approx([0.4, 0.5], abs=0.001)


async def test_a_limit_of_another_key_takes_nothing_from_the_conversation(
    triton: FakeTriton, gateway: RunningGateway
) -> None:
    said = "sampling_parameters.tools: 200 tools, the limit is 128 [omni:too_large;stage=thinker]"
    triton.script = lambda *_: iter([failure(said)])
    async with talk(gateway.base, **TEXT) as session:
        for number in range(3):
            await session.say(f"Number {number} is here.")
        done = (await session.asked("response.create", "response.done")).response
        assert "conversation.item.deleted" not in session.types()
    error = done.status_details.error
    assert (done.status, error.code, error.message) == (
        "failed",
        "too_large",
        "tools: 200 tools, the limit is 128",
    )
    assert len(triton.requests) == 1


async def test_a_medium_that_is_refused_is_named_by_its_item_and_takes_nothing_else_away(
    triton: FakeTriton, gateway: RunningGateway
) -> None:
    said = "9000 x 9000 pixels, the limit is 16777216 in all"
    triton.script = lambda *_: iter([failure(f"medium 1 (image): {said} [omni:too_large;stage=thinker]")])
    url = f"data:image/png;base64,{base64.b64encode(image_file('png')).decode()}"
    parts = [{"type": "input_text", "text": "And this?"}, {"type": "input_image", "image_url": url}]
    async with talk(gateway.base, **TEXT) as session:
        await spoken(session, 0.2)
        item = {"type": "message", "role": "user", "content": parts}
        shown = (await session.asked("conversation.item.create", "conversation.item.done", item=item)).item
        done = (await session.asked("response.create", "response.done")).response
        assert "conversation.item.deleted" not in session.types()
    error = done.status_details.error
    assert (error.code, error.message) == ("too_large", f"{shown.id}.content[1]: {said}")
    assert len(triton.requests) == 1


async def test_sound_that_nobody_could_hear_is_refused_and_not_kept(gateway: RunningGateway) -> None:
    async with talk(gateway.base, **TEXT) as session:
        for audio in ("", base64.b64encode(noise(0.09).tobytes()).decode()):
            parts = [{"type": "input_text", "text": "Listen."}, {"type": "input_audio", "audio": audio}]
            item = {"type": "message", "role": "user", "content": parts}
            error = await session.refused("conversation.item.create", item=item)
            assert (error.param, error.code) == ("item.content[1].audio", "invalid_value")
            assert "ms of sound; at least 100 ms" in error.message


async def spoken(session: Talk, seconds: float) -> str:
    """Id of the item of a turn of the user."""
    await session.append(noise(seconds))
    return str((await session.asked("input_audio_buffer.commit", "conversation.item.done")).item.id)
