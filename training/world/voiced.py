# SPDX-License-Identifier: Apache-2.0
"""Prompts that users speak to `mini`: spoken questions with their replies, and sentences that are only written down."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from training.world import facts, spoken, stories, talk
from training.world.slots import Doc
from training.world.talk import Turn

WRITE_DOWN = (
    "Write down what is said, word by word.",
    "What is said?",
    "Write down what you hear.",
    "What do you hear?",
    "What did I say?",
    "Repeat what is said.",
)
"""Written questions beside a sound that ask for its words."""


@dataclass(frozen=True)
class Prompt:
    """A text that is spoken to the model."""

    kind: str
    """fact, talk, story, count, animal, memory, unknown, say or words."""
    text: str
    reply: str | None
    """None: it is no question, its words can only be written down."""
    word: str | None = None
    """The reply in one word, of facts."""
    follow: tuple[Turn, ...] = ()
    """A written turn that may follow."""


def prompt(rng: random.Random) -> Prompt:
    """A prompt without figures, which flite reads in its own way."""
    while True:
        (draw,) = rng.choices([draw for _, draw in _DRAWS], [weight for weight, _ in _DRAWS])
        found = draw(rng)
        is_kept = found.kind in ("say", "words") and spoken.held_out(found.reply or found.text)
        if not is_kept and not re.search(r"[\d+]|'s\b", found.text):
            return found


def _fact(rng: random.Random) -> Prompt:
    found = facts.fact(rng)
    return Prompt("fact", found.ask, found.reply, found.word)


def _story(rng: random.Random) -> Prompt:
    ask, sentences = stories.asked_story(rng)
    return Prompt("story", ask, " ".join(sentences))


def _memory(rng: random.Random) -> Prompt:
    doc, memory = Doc(rng), rng.choice(talk.MEMORIES)
    text, reply = talk.told(rng, doc, memory)
    return Prompt("memory", text, reply, follow=(talk.asked(rng, doc, memory, was_told=True),))


def _say(rng: random.Random) -> Prompt:
    text = rng.choice((spoken.sentence, spoken.loose_words))(rng)
    return Prompt("say", f"{rng.choice(('Say', 'Repeat after me', 'Please say'))}: {text}", text)


def _words(rng: random.Random) -> Prompt:
    return Prompt("words", spoken.sentence(rng) if rng.random() < 0.4 else spoken.loose_words(rng), None)


_DRAWS: tuple[tuple[float, Callable[[random.Random], Prompt]], ...] = (
    (0.34, _fact),
    (0.16, lambda rng: Prompt("talk", *talk.fixed(rng))),
    (0.05, _story),
    (0.08, _memory),
    (0.03, lambda rng: Prompt("count", *facts.counting(rng))),
    (0.03, lambda rng: Prompt("animal", *facts.animal_description(rng))),
    (0.05, lambda rng: Prompt("unknown", *talk.unknown(rng, spoken.WORDS))),
    (0.06, _say),
    (0.20, _words),
)
"""How often a kind of prompt is drawn, and what draws one."""
