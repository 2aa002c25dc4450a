# SPDX-License-Identifier: Apache-2.0
"""Sentences and loose words to be said: what "Say: …" repeats, and what the voices learn to pronounce."""

from __future__ import annotations

import random
import zlib

from training.world import facts, stories, talk, words
from training.world.slots import KINDS, Doc, template_words
from training.world.words import capital

SENTENCES = (
    "The {color} {object} is on the table.",
    "My {family} has {a color} {object}.",
    "I like {food} and {food2}.",
    "{name} and {name2} are in the {place}.",
    "The {animal} is sleeping under the {object}.",
    "It is {weather} today.",
    "We will go to the {place} on {day}.",
    "In {month}, the weather is {weather}.",
    "There are {number} {count} in the {container}.",
    "Please open the {object}.",
    "Where is the {color} {object}?",
    "How many {count} do you want?",
    "The {job} {verbobject} the {object} {adverb}.",
    "{name} {verb} to the {place} with {a animal}.",
    "Can you see the {size} {animal} near the {place}?",
    "My {family} is {a mood} {job}.",
    "The train leaves at {number} o'clock.",
    "Do you want some {food}?",
    "What a {mood} {animal}!",
    "Thank you very much, {name}.",
    "Good morning, {name}.",
    "Please bring me the {color} {object} and the {object2}.",
    "I think the {animal} is {feeling}.",
    "You should eat more {food}.",
    "The {place} is {number} miles from the {place2}.",
    "She gave the {object} to her {family}.",
    "He was {feeling}, but she was {feeling2}.",
    "This {object} costs {number} dollars.",
    "Let us meet at the {place} at {number} o'clock.",
    "{^time}, we {verb} near the {place}.",
    "The {animal} and the {animal2} are {mood} friends.",
    "Never give {food} to {a animal}.",
    "Listen to the {mood} {animal}.",
    "My favorite color is {color}.",
    "Her birthday is in {month}.",
    "The {object} is {color} and {color2}.",
    "I have lost my {object}.",
    "Today is {day}.",
    "Tomorrow we will {deed}.",
    "It is time to {deed}.",
    "They want to {deed}.",
    "I would like to {deed}, please.",
    "Why did the {animal} {deed}?",
)

ASKS = (
    "Say: {}",
    "Say: {}",
    "Repeat after me: {}",
    "Please say: {}",
    "Read this aloud: {}",
    "Say this sentence: {}",
    "Repeat: {}",
    "Say {}",
    "Can you say: {}",
)
"""Requests to repeat something word for word."""


def _all_words() -> tuple[str, ...]:
    named = {
        *words.PEOPLE,
        *words.DAYS,
        *words.MONTHS,
        *facts.CAPITALS,
        *facts.CAPITALS.values(),
        "I",
        "Mini",
        "French",
        "German",
        "English",
    }
    lists = [words.COMMON, words.PAINTS, words.SHAPES, words.SEASONS, words.NUMBERS, tuple(words.TENS.values())]
    tables = [
        facts.AMOUNTS,
        facts.OPPOSITES,
        facts.SOUNDS,
        facts.CAPITALS,
        facts.THING_COLORS,
        facts.FOOD_OF,
        facts.HOMES,
    ]
    templates = [KINDS, stories.OPENINGS, stories.PLOTS, stories.EXTRAS, stories.CLOSINGS, SENTENCES, talk.REFUSALS]
    replies = [replies for _asks, replies in talk.FIXED.values()]
    found = template_words([lists, tables, templates, replies])
    return tuple(sorted({word if word in named else word.lower() for word in found}))


WORDS = _all_words()
"""Every word of the small world, in order."""


def sentence(rng: random.Random) -> str:
    """A plain sentence."""
    return Doc(rng).pick(SENTENCES)


def loose_words(rng: random.Random, least: int = 3, most: int = 9) -> str:
    """Words in no order, written as a sentence."""
    count = rng.randint(least, most)
    chosen = [rng.choice(WORDS) for _ in range(count)]
    if count > 5 and rng.random() < 0.4:
        chosen[rng.randint(1, count - 3)] += ","
    return capital(" ".join(chosen)) + rng.choice("....?!")


def held_out(text: str) -> bool:
    """True for one sentence in fifty, which training never asks to repeat or to write down."""
    return zlib.crc32(text.lower().encode()) % 50 == 0


def to_say(rng: random.Random) -> str:
    """One or two sentences that a user wants repeated, none of which is held out."""
    return " ".join(_one_to_say(rng) for _ in range(rng.choice((1, 1, 1, 2))))


def _one_to_say(rng: random.Random) -> str:
    draws = (sentence, sentence, loose_words, loose_words, lambda rng: rng.choice(stories.story(rng)))
    while held_out(text := rng.choice(draws)(rng)):
        pass
    return text


def say(rng: random.Random) -> tuple[str, str]:
    """A request to repeat, and the reply."""
    text = to_say(rng)
    return rng.choice(ASKS).format(text), text
