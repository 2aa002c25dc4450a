# SPDX-License-Identifier: Apache-2.0
"""Images, sounds and videos, alone and mixed, in one turn and in several, against HF's processor and `generate`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from reference.hf import HfReference
from server.asking import ask_together
from server.parity import (
    GREEDY,
    Chat,
    Expected,
    assert_equals_hf,
    assistant,
    check_reply,
    hf_reply,
    image,
    sound,
    system,
    user,
    video,
)
from server.serving import Served

IMAGE, WIDE = image(112, 84), image(168, 56)
SOUND, SHORT = sound(1.3), sound(0.4)
VIDEO, SMALL = video(1.0), video(1.5, width=112)
FILM, SECOND_FILM = video(2.0, audio=True), video(1.2, audio=True, width=96)
"""With a sound track."""
WHAT, WHICH = "what is this?", "which came first?"
CHATS = {
    "an image": Chat([user(IMAGE, WHAT)]),
    "a sound": Chat([user(SOUND, WHAT)]),
    "a video": Chat([user("Look. ", VIDEO, WHICH)]),
    "an image and a sound": Chat([user(IMAGE, SOUND, WHAT)]),
    "an image and a video": Chat([user(VIDEO, IMAGE, WHAT)]),
    "a sound and a video": Chat([user(SOUND, VIDEO, WHICH)]),
    "all kinds between words": Chat([user("Look at ", IMAGE, "hear ", SOUND, " and watch\n", VIDEO, WHICH)]),
    "several of each kind": Chat([user(IMAGE, SHORT, WIDE, VIDEO, "and ", SOUND, SMALL, WHAT)]),
    "a film that is not heard": Chat([user(FILM, WHAT)]),
    "a film that is heard": Chat([user(FILM, WHAT)], heard=True),
    "two films that are heard, and an image": Chat([user(SECOND_FILM, "or ", IMAGE, FILM, WHAT)], heard=True),
    "a sound before a film that is heard": Chat([user(SOUND, "and ", FILM, WHICH)], heard=True),
    "sounds between films that are heard": Chat(
        [user(FILM, SHORT, IMAGE, WHAT), assistant("a tone"), user(SECOND_FILM, "or ", SOUND, WHICH)], heard=True
    ),
    "a system prompt of the caller's": Chat([system("Answer as a pirate would."), user(IMAGE, WHAT)]),
    "media in earlier turns": Chat(
        [
            user(IMAGE, WHAT),
            assistant("a square"),
            user("And ", SOUND, "or ", VIDEO),
            assistant("a tone, and a square that moves"),
            user(WHICH),
        ]
    ),
    "media in every turn": Chat(
        [user(SOUND, WHAT), assistant("a tone"), user(VIDEO, SHORT), assistant("a film"), user(WIDE, "And now?")]
    ),
    "a film in an earlier turn": Chat([user(FILM, WHAT), assistant("a film"), user("Of what?")], heard=True),
}
VOICES = ("Chelsie", "Ethan")
AT_ONCE = (
    "all kinds between words",
    "several of each kind",
    "a film that is heard",
    "media in earlier turns",
    "an image and a sound",
    "a film in an earlier turn",
    "a sound before a film that is heard",
    "a sound and a video",
)

ExpectedOf = Callable[[str], Expected]


@pytest.fixture(scope="module")
def expected_of(hf: HfReference) -> ExpectedOf:
    """HF's reply to a chat by its name, asked for once."""
    replies: dict[str, Expected] = {}

    def expected(name: str) -> Expected:
        if name not in replies:
            voice = VOICES[list(CHATS).index(name) % len(VOICES)]
            replies[name] = hf_reply(hf, CHATS[name].hf_inputs(hf), voice)
        return replies[name]

    return expected


@pytest.mark.parametrize("name", CHATS)
def test_media_get_hf_tokens_rows_codes_and_waveform(
    server: Served, hf: HfReference, expected_of: ExpectedOf, name: str
) -> None:
    expected = expected_of(name)
    assert len(expected.reply.talker.codes) > 2
    request = CHATS[name].request(voice=expected.voice, seed=2**40 + 3, request_id=f"hf: {name}", **GREEDY)
    assert_equals_hf(server, hf, request, expected)


def test_different_media_at_once_get_hf_tokens_rows_codes_and_waveform(
    server: Served, hf: HfReference, expected_of: ExpectedOf
) -> None:
    expected = {name: expected_of(name) for name in AT_ONCE}
    requests = {
        name: CHATS[name].request(voice=found.voice, seed=seed, request_id=f"hf at once: {name}", **GREEDY)
        for seed, (name, found) in enumerate(expected.items())
    }
    replies = ask_together(server, requests)
    for name in AT_ONCE:
        check_reply(server, hf, requests[name], replies[name], expected[name])
    assert len({found.reply.talker.codes for found in expected.values()}) == len(AT_ONCE)
