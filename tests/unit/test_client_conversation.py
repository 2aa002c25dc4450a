# SPDX-License-Identifier: Apache-2.0
"""A conversation sends what was said, shown and heard before, and nothing that was not heard."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_fakes import INFO, FakeTriton, chosen_of, chunk, failure, final, inputs_of, serve_grpc
from media_samples import audio_file, encoded_sound, image_file, video_file
from triton_omni_client import (
    AsyncOmniClient,
    BadRequest,
    Conversation,
    Internal,
    Media,
    OmniClient,
    TextDelta,
    heard_text,
    load_media,
    media_kind,
)
from triton_omni_client.options import read_media
from waiting import IN_TIME_S

WORDS = "one two three four five six seven eight nine ten"
PICTURE, SOUND = Media("image", b"picture"), Media("audio", b"sound")


@pytest.fixture
def server() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton()) as fake:
        yield fake


@pytest.fixture
def client(server: FakeTriton) -> Iterator[OmniClient]:
    with OmniClient(server.url) as connected:
        yield connected


def asked(server: FakeTriton) -> list[tuple[str, Any]]:
    """Role and content of the last request's messages; a content of one text part is that text."""
    messages = json.loads(inputs_of(server.requests[-1])["messages"][0])
    return [(message["role"], _plain(message["content"])) for message in messages]


def test_turns_share_a_salt_with_each_other_and_nobody_else() -> None:
    one, other, given = Conversation(), Conversation(), Conversation(cache_salt="mine")
    salts = [talk.request(text).cache_salt for talk in (one, other) for text in ("a", "b")]
    assert salts[0] == salts[1] != salts[2] == salts[3]
    assert {len(salt) for salt in salts if salt} == {32}
    assert given.request("a").cache_salt == "mine"
    assert salts[0] not in repr(one.request("a"))


def _plain(content: Any) -> Any:
    if isinstance(content, str):
        return content
    found = [part.get("text", part["type"]) for part in content]
    return found[0] if len(found) == 1 else found


def speaking(seconds: float, text: str = WORDS, *, ends: bool = True) -> Any:
    """A script whose text comes at once, with all of its speech."""

    def script(_request: Any, context: Any) -> Iterator[Any]:
        yield chunk(text=text, audio=np.zeros(round(seconds * 24_000), np.float32))
        if ends:
            yield chunk(info=INFO)
            yield final()
        else:
            gone = threading.Event()
            if context.add_callback(gone.set):
                gone.wait(IN_TIME_S)

    return script


def test_each_turn_sends_all_turns_before_it_with_their_media_in_order(server: FakeTriton, client: OmniClient) -> None:
    chat = Conversation(system="Be brief.", voice="Ethan")
    assert chat.ask(client, "What is it?", [PICTURE]).collect().text == "Hello, sea."
    chat.ask(client, "", [SOUND], seed=4).collect()
    chat.ask(client, "Why?", voice="Chelsie").collect()
    assert asked(server) == [
        ("system", "Be brief."),
        ("user", ["image", "What is it?"]),
        ("assistant", "Hello, sea."),
        ("user", "audio"),
        ("assistant", "Hello, sea."),
        ("user", "Why?"),
    ]
    assert inputs_of(server.requests[-1])["media"] == [b"picture", b"sound"]
    assert [chosen_of(request) for request in server.requests] == [
        {"voice": "Ethan"},
        {"voice": "Ethan", "seed": 4},
        {"voice": "Chelsie"},
    ]
    assert [turn.reply for turn in chat.turns] == ["Hello, sea."] * 3
    chat.reset()
    chat.ask(client, "Anew").collect()
    assert asked(server) == [("system", "Be brief."), ("user", "Anew")]


def test_a_reply_cut_off_is_kept_as_far_as_it_was_heard(server: FakeTriton, client: OmniClient) -> None:
    server.script = speaking(9, ends=False)
    chat = Conversation()
    turn = chat.ask(client, "Count")
    assert next(turn) == TextDelta(WORDS)
    turn.close(heard=1.0)
    assert server.cancelled.wait(IN_TIME_S)
    assert [turn.reply for turn in chat.turns] == ["one two three"]  # 15 letters a second, to the end of a word
    server.script = speaking(1)
    chat.ask(client, "Go on").collect()
    assert asked(server)[1:] == [("assistant", "one two three"), ("user", "Go on")]


def test_a_reply_whose_playing_is_cut_off_after_its_end_is_made_shorter(client: OmniClient, server: FakeTriton) -> None:
    server.script = speaking(10)
    chat = Conversation()
    turn = chat.ask(client, "Count")
    turn.collect()
    assert chat.turns[-1].reply == WORDS
    turn.close(heard=5.0)  # half of its ten seconds
    assert [turn.reply for turn in chat.turns] == ["one two three four five"]
    turn.close(heard=99)
    assert [turn.reply for turn in chat.turns] == [WORDS]
    chat.reset()
    turn.close(heard=1.0)
    assert chat.turns == ()


def test_a_reply_of_which_nothing_was_heard_leaves_the_question_alone(server: FakeTriton, client: OmniClient) -> None:
    server.script = speaking(9, ends=False)
    chat = Conversation()
    turn = chat.ask(client, "Count")
    next(turn)
    turn.close(heard=0)
    server.script = speaking(1)
    chat.ask(client, "Stop that").collect()
    assert asked(server) == [("user", "Count"), ("user", "Stop that")]


def test_asking_again_ends_the_reply_that_still_runs(server: FakeTriton, client: OmniClient) -> None:
    server.script = speaking(9, ends=False)
    chat = Conversation()
    first = chat.ask(client, "Count")
    next(first)
    server.script = speaking(1)
    chat.ask(client, "Enough").collect()
    assert server.cancelled.wait(IN_TIME_S)
    assert asked(server) == [("user", "Count"), ("assistant", WORDS), ("user", "Enough")]
    first.close()
    assert len(chat.turns) == 2


def test_a_turn_that_cannot_be_asked_ends_no_reply(server: FakeTriton, client: OmniClient) -> None:
    server.script = speaking(9, ends=False)
    chat = Conversation()
    first = chat.ask(client, "Count")
    next(first)
    with pytest.raises(BadRequest, match="timeout"):
        chat.ask(client, "Enough", timeout=-1)
    with pytest.raises(BadRequest, match="messages"):
        chat.ask(client, "\ud800")
    assert chat.turns == ()
    assert not server.cancelled.wait(0.1)
    first.close()


def test_a_turn_that_is_forgotten_is_cancelled_and_kept_as_far_as_it_was_taken(
    server: FakeTriton, client: OmniClient
) -> None:
    server.script = speaking(9, ends=False)
    chat = Conversation()
    turn = chat.ask(client, "Count")
    next(turn)
    del turn
    assert server.cancelled.wait(IN_TIME_S)
    assert [turn.reply for turn in chat.turns] == [WORDS]


def test_a_turn_that_fails_leaves_the_conversation_as_it_was(server: FakeTriton, client: OmniClient) -> None:
    server.script = lambda *_: iter([chunk(text="so far"), failure("broken [omni:internal]")])
    chat = Conversation()
    with pytest.raises(Internal):
        chat.ask(client, "Count").collect()
    assert chat.turns == ()


def test_a_turn_held_in_another_way_can_be_added() -> None:
    chat = Conversation()
    chat.add("What?", [PICTURE], "A beach.")
    request = chat.request("Where?")
    assert request.messages is not None
    assert [message["role"] for message in request.messages] == ["user", "assistant", "user"]
    assert request.media == [b"picture"]


async def test_a_conversation_of_a_task(server: FakeTriton) -> None:
    chat = Conversation()
    async with AsyncOmniClient(server.url) as client:
        assert [text async for text in chat.ask_async(client, "hi").texts()] == ["Hello", ", sea."]
        server.script = speaking(9, ends=False)
        turn = chat.ask_async(client, "Count")
        assert await anext(turn) == TextDelta(WORDS)
        assert turn.timings().first_text is not None
        chat.stop(heard=1.0)
        assert await asyncio.to_thread(server.cancelled.wait, IN_TIME_S)
        assert [turn.reply for turn in chat.turns] == ["Hello, sea.", "one two three"]
        server.script = lambda *_: iter([failure("broken [omni:internal]")])
        with pytest.raises(Internal):
            await chat.ask_async(client, "More").collect()
        assert len(chat.turns) == 2


@pytest.mark.parametrize(
    ("text", "heard", "total", "kept"),
    [
        (WORDS, 0, None, ""),
        (WORDS, 0.1, None, ""),
        (WORDS, 0.2, None, "one"),
        (WORDS, 100, None, WORDS),
        (WORDS, 10, 10, WORDS),
        (WORDS, 5, 10, "one two three four five"),
        (WORDS, 0, 0, WORDS),  # a reply of text alone
        ("", 5, 10, ""),
        ("Donaudampfschifffahrt", 0.5, None, ""),
        ("今天天气很好", 0.6, None, "今天天"),
        ("one today 今天天气很好", 1.2, None, "one today 今天"),
    ],
)
def test_what_was_heard_of_a_text(text: str, heard: float, total: float | None, kept: str) -> None:
    assert heard_text(text, heard, total) == kept


def test_what_was_heard_grows_with_time_and_is_a_beginning() -> None:
    found = [heard_text(WORDS + " 今天天气很好", seconds / 20) for seconds in range(200)]
    assert found == sorted(found, key=len)
    assert all((WORDS + " 今天天气很好").startswith(text) for text in found)
    assert len(set(found)) == 1 + 10 + 6


FILES = {
    **{f"{kind}.bin": ("audio", audio_file(kind, seconds=0.1)) for kind in ("wav", "mp3", "flac", "ogg")},
    **{f"{kind}.bin": ("image", image_file(kind)) for kind in ("png", "jpeg", "webp")},
    **{f"{kind}.bin": ("video", video_file(kind, seconds=0.25)) for kind in ("mp4", "webm")},
    "memo.m4a": ("audio", encoded_sound("ipod", "aac", seconds=0.5)),
    "memo.webm": ("audio", encoded_sound("webm", "libopus", rate=48000, seconds=0.5)),
    "memo.mp4": ("audio", encoded_sound("mp4", "aac", seconds=0.5)),
    "talking.webm": ("video", video_file("webm", seconds=0.25, audio=True)),
    "talking.mp4": ("video", video_file("mp4", seconds=0.25, audio=True)),
    "raw": ("audio", encoded_sound("adts", "aac", seconds=0.5)),
    "call": ("audio", encoded_sound("amr", "libopencore_amrnb", rate=8000, bit_rate=12200, seconds=0.5)),
    "tagged.mp3": ("audio", b"ID3\4" + bytes(20)),
    "old.gif": ("image", b"GIF89a"),  # for the server to refuse
    "tape.aiff": ("audio", b"FORM"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_s_kind_is_told_by_its_content_and_else_by_its_name(tmp_path: Path, name: str) -> None:
    kind, data = FILES[name]
    (tmp_path / name).write_bytes(data)
    found = load_media(tmp_path / name)
    assert (found.kind, found.data) == (kind, data)
    if name.endswith(".bin"):
        assert media_kind(data[:12], "misleading.png") == kind


@pytest.mark.parametrize("name", ["picture.png", "memo.m4a", "notes"])
def test_an_empty_file_is_refused_whatever_its_name_says(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(BadRequest, match=rf"{name}: is empty"):
        load_media(tmp_path / name)
    for kind in range(3):
        with pytest.raises(BadRequest, match=rf"{name}: is empty"):
            read_media(*([tmp_path / name] if kind == place else None for place in range(3)))


@pytest.mark.parametrize("data", [b"\xff", b"plain text", b"RIFF\0\0\0\0AVI "])
def test_what_is_no_medium_is_refused_by_name(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(data)
    with pytest.raises(BadRequest, match=r"notes\.txt: neither"):
        load_media(tmp_path / "notes.txt")
    with pytest.raises(BadRequest, match=r"none\.png: cannot be read"):
        load_media(tmp_path / "none.png")
