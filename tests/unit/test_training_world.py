# SPDX-License-Identifier: Apache-2.0
"""The small world of text: stories, chats, facts, what is held out, which replies are right."""

from __future__ import annotations

import random
import re

import pytest
from training.sizes import SPECIAL_TOKENS, VOCAB
from training.tokens import IM_END, Medium, decode, encode, encode_chat, encode_prompt, tokenizer, train_tokenizer
from training.world import chats, facts, scenes, spoken, stories, talk, voiced
from training.world.answers import is_right, story_faults, word_errors
from training.world.chats import Chat


def test_stories_repeat_no_sentence_and_use_known_words() -> None:
    rng = random.Random(1)
    known = {word.lower() for word in spoken.WORDS}
    seen = set()
    for _ in range(400):
        sentences = stories.story(rng)
        assert len(set(sentences)) == len(sentences) >= 6
        words = {word.lower() for sentence in sentences for word in re.findall(r"[A-Za-z']+", sentence)}
        assert words <= known
        assert not any("{" in sentence for sentence in sentences)
        seen.add(tuple(sentences))
    assert len(seen) == 400


@pytest.mark.parametrize(
    ("given", "word"), [({"animal": "fox"}, "fox"), ({"name": "Anna"}, "Anna"), ({"job": "baker"}, "baker")]
)
def test_a_story_is_about_what_was_asked(given: dict[str, str], word: str) -> None:
    rng = random.Random(2)
    assert all(word in " ".join(stories.story(rng, **given)) for _ in range(50))


def test_equal_seeds_give_equal_chats() -> None:
    assert [chats.chat(random.Random(3)) for _ in range(3)] == [chats.chat(random.Random(3)) for _ in range(3)]


def test_held_out_sentences_are_in_no_chat() -> None:
    rng = random.Random(4)
    said = [chat.turns[-1][1] for chat in (chats.chat(rng) for _ in range(4000)) if chat.kind == "say"]
    assert len(said) > 300
    assert not any(spoken.held_out(part) for reply in said for part in chats.split_sentences(reply))
    assert any(spoken.held_out(spoken.loose_words(rng)) for _ in range(500))


def test_what_is_told_is_recalled() -> None:
    rng = random.Random(5)
    for _ in range(200):
        turns = talk.remembering(rng, [talk.fixed(rng)])
        for ask, reply in turns:
            if ask == "What is my name?" and not reply.startswith("You have not"):
                name = reply.removeprefix("Your name is ").rstrip(".")
                assert any(name in told for told, _ in turns[: turns.index((ask, reply))])


@pytest.mark.parametrize("seed", range(3))
def test_sums_are_right(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        found = facts.sum_fact(rng)
        a, sign, b = re.search(r"(\w+) (plus|minus) (\w+) is", found.reply.lower()).groups()  # type: ignore[union-attr]
        from training.world.words import NUMBERS

        value = NUMBERS.index(a) + (1 if sign == "plus" else -1) * NUMBERS.index(b)
        assert found.word.lower() == NUMBERS[value] + "."
        assert found.reply.endswith(f"is {NUMBERS[value]}.")


def test_one_word_chats_answer_in_one_word() -> None:
    rng = random.Random(6)
    for _ in range(100):
        chat = chats.one_word_chat(rng)
        if any(part in chat.system for part in chats.ONE_WORD):
            assert all(" " not in reply for _, reply in chat.turns)


def test_scenes_say_what_is_there() -> None:
    rng = random.Random(7)
    for _ in range(200):
        scene = scenes.picture(rng)
        text = scenes.description(scene)
        assert all(thing.color in text for thing in scene.things)
        numbers = [question for question in scenes.questions(scene) if question.asks[0].startswith("How many shapes")]
        assert numbers[0].word == ("zero", "one", "two", "three", "four", "five")[len(scene.things)]
    moving = [scenes.video(rng) for _ in range(50)]
    assert {scene.move for scene in moving} == set(scenes.MOVES)
    for scene in moving:
        thing = scene.things[0]
        assert (thing.to_x > thing.x) == (scene.move == "right")
        assert (thing.to_x < thing.x) == (scene.move == "left")


def test_spoken_prompts_have_no_figures() -> None:
    rng = random.Random(8)
    assert not any(re.search(r"\d", voiced.prompt(rng).text) for _ in range(500))


@pytest.mark.parametrize(
    ("wanted", "got", "right"),
    [
        ("Nice to meet you, Anna!", "Hello, Anna! It is nice to meet you.", True),
        ("Nice to meet you, Anna!", "Nice to meet you, Tom!", False),
        ("I do not know that.", "I am sorry, I do not know that. Shall I tell you a story?", True),
        ("Seven.", "Eight.", False),
        ("A bear is a good friend.", "How nice! I like your bear.", True),
        ("Good night! Sleep well and dream of the hill.", "Good night! Sleep well and dream of the sea.", True),
    ],
)
def test_other_wordings_are_right(wanted: str, got: str, right: bool) -> None:
    assert is_right(wanted, got) is right


def test_word_errors_and_story_faults() -> None:
    assert word_errors("The red ball.", "the red big ball") == (1, 3)
    assert word_errors("One two three", "") == (3, 3)
    story = "A fox ran. It was happy. It was happy. The end came."
    assert story_faults("Tell me a story about a fox", story, ended=True) == ["repeats"]
    assert story_faults("Tell me a story about an owl.", story, ended=False) == ["no end", "repeats", "another topic"]


def test_the_tokenizer_knows_every_word_and_special_token() -> None:
    for found in (tokenizer(), train_tokenizer(400)):
        assert found.get_vocab_size() == VOCAB.base + len(SPECIAL_TOKENS)
        assert all(found.token_to_id(token) == VOCAB.id_of(token) for token in SPECIAL_TOKENS)
    for word in spoken.WORDS:
        assert decode(encode(word)) == word
    text = " ".join(spoken.WORDS)
    assert len(encode(text)) < 3 * len(spoken.WORDS)


def test_equal_arguments_give_equal_tokenizers() -> None:
    assert train_tokenizer(300).to_str() == train_tokenizer(300).to_str()


def test_chats_are_tokenised_as_the_server_does() -> None:
    from triton_omni.request.chat import Message, TextPart
    from triton_omni.thinker.prompt import PromptRenderer

    class Fast:
        backend_tokenizer = tokenizer()

    renderer = PromptRenderer(Fast())
    for ask in ("Hello", "Say: The red fox.", "  two  plus\n\ntwo?"):
        wanted = renderer.render([Message("user", (TextPart(ask),))])
        assert tuple(encode_prompt(Chat("talk", ((ask, "Yes."),)))) == wanted


def test_replies_and_their_ends_count() -> None:
    chat = Chat("talk", (("Hello", "Hi there."), ("Who are you?", "My name is Mini.")))
    row = encode_chat(chat, {0: Medium("audio", 7)})
    counted = [number for number, counts in zip(row.ids, row.counts, strict=True) if counts]
    assert decode(counted) == "Hi there.My name is Mini."
    assert counted.count(IM_END) == 2
    assert row.ids.count(Medium("audio", 1).ids[1]) == 7
