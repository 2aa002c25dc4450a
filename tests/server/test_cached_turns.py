# SPDX-License-Identifier: Apache-2.0
"""Conversations through a server whose thinker and talker have prefix caches. Turns that hit them equal turns that do
not, and rows that the talker has are not sent."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from media_samples import tone
from reference.hf import HfReference
from server.conversations import (
    BLOCK,
    CACHING,
    IDLE_AFTER_KILLS_S,
    SCRIPTS,
    SHORT,
    TALKER,
    THINKER,
    PlayedTurn,
    assert_same,
    converse,
    hits,
)
from server.parity import Chat, check_reply, hf_reply, user
from server.random_turns import KILLED, random_turns
from server.serving import Served, note_figures, serve, wait_for
from triton_omni_client import Conversation, Media, Reply
from triton_omni_client.audio import wav_header
from triton_omni_client.listening import HEARD_RATE

RANDOM_TURNS = int(os.environ.get("OMNI_TEST_TURNS", "60"))
"""2,000 of them take some 20 minutes on two cores."""
TURNS_A_KILL = 300
TURNS_A_RARITY = 200
"""In so many turns there is a hit and a preemption in each stage; a short run may have none."""
SECOND_TOKENS = 25
"""Tokens of a second of sound."""


@pytest.fixture(scope="module")
def caching(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("caching"), tiny_checkpoint, CACHING) as served:
        yield served
        served.wait_until_idle(IDLE_AFTER_KILLS_S)
        # Not all of `Served.stop`: Triton still counts what a stage had when it was killed.
        served.stop_whatever_is_left()


@pytest.fixture
def server(caching: Served) -> Iterator[Served]:
    yield caching
    caching.wait_until_idle(IDLE_AFTER_KILLS_S)


@pytest.mark.parametrize("name", ["text 0", "mixed 0"])
def test_ten_turns_are_the_same_with_the_caches_and_without_and_the_last_is_hf_s(
    server: Served, hf: HfReference, name: str
) -> None:
    salted = converse(server, f"alone, salted: {name}", SCRIPTS[name], f"alone: {name}")
    plain = converse(server, f"alone: {name}", SCRIPTS[name], None)
    prompts = [len(server.records.prompt(told.request.request_id)) // BLOCK * BLOCK for told in salted]
    assert hits(server, plain, salted) == [0, *prompts[:-1]]
    assert prompts[-1] > 5 * BLOCK
    assert_last_is_hf_s(server, hf, plain[-1])


def assert_last_is_hf_s(server: Served, hf: HfReference, told: PlayedTurn) -> None:
    expected = hf_reply(hf, told.chat.hf_inputs(hf), told.voice, thinker=THINKER, talker=TALKER)
    assert len(expected.reply.talker.codes) > 2
    check_reply(server, hf, told.request, told.reply, expected)


def test_eight_conversations_at_once_do_not_mix(server: Served, hf: HfReference) -> None:
    def all_at_once(kind: str, salted: bool) -> dict[str, list[PlayedTurn]]:
        with ThreadPoolExecutor(len(SCRIPTS)) as pool:
            told = {
                name: pool.submit(converse, server, f"{kind}: {name}", script, f"{kind}: {name}" if salted else None)
                for name, script in SCRIPTS.items()
            }
            return {name: one.result() for name, one in told.items()}

    salted, plain = all_at_once("salted", salted=True), all_at_once("plain", salted=False)
    for name in SCRIPTS:
        first, *later = hits(server, plain[name], salted[name])
        assert first == 0
        assert all(later)
        assert_last_is_hf_s(server, hf, plain[name][-1])


def test_what_was_only_written_is_held_by_the_thinker_alone(server: Served) -> None:
    chat = Chat([user("a question that is longer than a block, and is answered by a text alone, as this one is")])

    def ask(request_id: str, salt: str | None, modalities: list[str] | None = None) -> Reply:
        request = chat.request(request_id=request_id, cache_salt=salt, modalities=modalities, **SHORT)
        return server.client.stream(request).collect()

    ask("written", "a reader", ["text"])
    replies = (ask("plain", None), ask("spoken", "a reader"))
    assert assert_same(server, "plain", "spoken", replies) == 0
    assert assert_same(server, "plain", "again", (replies[0], ask("again", "a reader"))) > 0
    assert assert_same(server, "plain", "other", (replies[0], ask("other", "another"))) == 0


def test_an_utterance_sent_while_it_is_spoken_is_answered_as_one_that_is_not(server: Served) -> None:
    sound = (tone(5.0, HEARD_RATE) * 32_767).astype(np.int16)
    plain, salted = Conversation(cache=False, audio_in_pieces=True, **SHORT), Conversation(**SHORT)
    for turn in range(2):
        names = [f"{kind} utterance {turn}" for kind in ("plain", "salted")]
        with salted.listen(server.client) as listening:
            for block in np.split(sound, 10):
                listening.write(block)
                wait_for(lambda: not listening._is_hinting, server.log)
            assert listening.refusal is None
            second = listening.ask("What is it?", request_id=names[1]).collect()
        media = [Media("audio", wav_header(len(sound), HEARD_RATE) + sound.tobytes())]
        first = plain.ask(server.client, "What is it?", media, request_id=names[0]).collect()
        held = assert_same(server, names[0], names[1], (first, second))
        assert len(server.records.prompt(names[1])) - held < 2 * BLOCK + SECOND_TOKENS


def test_random_turns_barge_ins_and_kills_in_a_cache_of_few_blocks_change_no_reply(server: Served) -> None:
    kills = max(len(KILLED), RANDOM_TURNS // TURNS_A_KILL)
    counts = random_turns(server, RANDOM_TURNS, seed=RANDOM_TURNS, kills=kills)
    note_figures(**counts)
    assert all(counts[name] for name in ("compared", "cancelled", "thinker evicted", "talker evicted")), counts
    for stage, rare in itertools.product(KILLED, ("hits", "preempted")):
        assert counts[f"{stage} {rare}"] >= RANDOM_TURNS // TURNS_A_RARITY, counts
    salted, plain = (converse(server, f"afterwards: {salt}", SCRIPTS["text 1"][:2], salt) for salt in ("again", None))
    assert hits(server, plain, salted)[1] > 0
