# SPDX-License-Identifier: Apache-2.0
"""Chats of text: what users ask `mini`, over one or several turns, under which system prompt, and what it replies."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from training.world import facts, spoken, stories, talk
from training.world.talk import Turn

DEFAULT_SYSTEM_PROMPT = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory and "
    "visual inputs, as well as generating text and speech."
)
"""The server's default. Not imported from there: a machine that trains has not what a server needs."""
SYSTEMS = ("You are a helpful assistant.", "You are a friendly voice.", "Be kind.", "You are Mini.")
"""System prompts that change nothing."""
ONE_WORD = ("Answer in one word.", "Answer in one word only.", "Reply with one word.", "Use one word only.")
"""System prompts, or the ends of some, that ask for one word."""


@dataclass(frozen=True)
class Chat:
    """Turns of a user and `mini`."""

    kind: str
    """story, say, fact, talk, memory, count, animal or unknown: that of the last turn."""
    turns: tuple[Turn, ...]
    system: str = DEFAULT_SYSTEM_PROMPT

    @property
    def sentences(self) -> list[str]:
        """Those of the last reply."""
        return split_sentences(self.turns[-1][1])


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, with their ends."""
    return [found.strip() for found in re.findall(r"[^.!?]+[.!?]+", text)]


def _fact_turn(rng: random.Random) -> Turn:
    found = facts.fact(rng)
    return found.ask, found.reply


def _story_turn(rng: random.Random) -> Turn:
    ask, sentences = stories.asked_story(rng)
    return ask, " ".join(sentences)


def _unknown_turn(rng: random.Random) -> Turn:
    return talk.unknown(rng, spoken.WORDS)


_TURNS: dict[str, tuple[float, Callable[[random.Random], Turn]]] = {
    "story": (0.26, _story_turn),
    "say": (0.26, spoken.say),
    "fact": (0.22, _fact_turn),
    "count": (0.05, facts.counting),
    "animal": (0.03, facts.animal_description),
    "talk": (0.12, talk.fixed),
    "unknown": (0.07, _unknown_turn),
}
"""Kinds of turns, how often they are drawn, and what draws one."""


def single(rng: random.Random) -> tuple[str, Turn]:
    """Kind and turn of a chat of one turn."""
    (kind,) = rng.choices(tuple(_TURNS), [weight for weight, _ in _TURNS.values()])
    return kind, _TURNS[kind][1](rng)


def chat(rng: random.Random) -> Chat:
    """A chat of one turn or several, with any system prompt."""
    draw = rng.random()
    if draw < 0.58:
        kind, turn = single(rng)
        return _written(rng, Chat(kind, (turn,), _system(rng)))
    if draw < 0.70:
        return one_word_chat(rng)
    if draw < 0.86:
        return _written(rng, Chat("memory", tuple(talk.remembering(rng, _short_turns(rng, 3))), _system(rng)))
    kind, last = single(rng)
    return _written(rng, Chat(kind, (*_short_turns(rng, 3), last), _system(rng)))


def one_word_chat(rng: random.Random) -> Chat:
    """Facts under a system prompt that asks for one word; or a follow-up that asks for it."""
    if rng.random() < 0.25:
        found = facts.fact(rng)
        again = rng.choice(("Say it in one word.", "In one word, please.", "In one word?"))
        return _written(rng, Chat("word", ((found.ask, found.reply), (again, found.word)), _system(rng)))
    system = rng.choice(ONE_WORD)
    if rng.random() < 0.4:
        system = f"{rng.choice((DEFAULT_SYSTEM_PROMPT, *SYSTEMS))} {system}"
    turns = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        found = facts.fact(rng)
        turns.append((found.ask, found.word))
        if rng.random() < 0.12:
            turns.append((talk.unknown(rng, spoken.WORDS)[0], talk.UNKNOWN_WORD))
    return _written(rng, Chat("word", tuple(turns), system))


def _short_turns(rng: random.Random, most: int) -> list[Turn]:
    """From none to `most` turns of facts and small talk."""
    return [talk.fixed(rng) if rng.random() < 0.5 else _fact_turn(rng) for _ in range(rng.choice(range(most + 1)))]


def _system(rng: random.Random) -> str:
    return DEFAULT_SYSTEM_PROMPT if rng.random() < 0.88 else rng.choice(SYSTEMS)


def _written(rng: random.Random, chat: Chat) -> Chat:
    """The chat as users write: some in lower case, some without or with another mark at the end."""
    turns = tuple((ask if ":" in ask else vary(rng, ask), reply) for ask, reply in chat.turns)
    return Chat(chat.kind, turns, chat.system)


def vary(rng: random.Random, ask: str) -> str:
    """One of the ways to write a question."""
    for long, short in (("What is ", "What's "), ("I am ", "I'm "), ("name is ", "name's ")):
        if long in ask and rng.random() < 0.1:
            ask = ask.replace(long, short)
    if rng.random() < 0.04:
        return f"{ask.rstrip('.!?')}, please{ask[-1] if ask[-1] in '.!?' else ''}"
    draw = rng.random()
    if draw < 0.1:
        return ask.lower()
    if draw < 0.2:
        return ask.rstrip(".!?")
    return ask + "." if draw < 0.25 and ask[-1].isalpha() else ask
