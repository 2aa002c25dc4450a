# SPDX-License-Identifier: Apache-2.0
"""Templates with slots: `{animal}`, `{a mood}` with its article, `{^a size}` with a capital. A slot keeps its value.

A digit at a slot's end makes another one of the same kind, which gets another value: `{animal}`, `{animal2}`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from training.world import words
from training.world.words import capital, with_article

KINDS: dict[str, Sequence[str]] = {
    "animal": words.ANIMALS,
    "color": words.COLORS,
    "size": words.SIZES,
    "mood": words.MOODS,
    "place": words.PLACES,
    "object": words.OBJECTS,
    "thing": words.THINGS_TO_CARRY,
    "food": words.FOODS,
    "count": words.COUNTED_FOODS,
    "container": words.CONTAINERS,
    "joy": words.JOYS,
    "good": words.VIRTUES,
    "bad": words.FAULTS,
    "name": words.NAMES,
    "person": words.PEOPLE,
    "girl": words.GIRLS,
    "boy": words.BOYS,
    "family": words.FAMILY,
    "job": words.JOBS,
    "weather": words.WEATHER,
    "time": words.TIMES,
    "number": words.NUMBERS[2:13],
    "adverb": words.ADVERBS,
    "verb": words.VERBS_PAST,
    "verbobject": words.VERBS_OBJECT,
    "feeling": words.FEELINGS,
    "day": words.DAYS,
    "month": words.MONTHS,
    "deed": words.DEEDS,
    "skill": words.SKILLS,
}
_SLOT = re.compile(r"\{(\^?)(a )?(\w+)\}")


class Doc:
    """The slots of one document."""

    def __init__(self, rng: random.Random, **given: str) -> None:
        self.rng, self.values = rng, dict(given)

    def get(self, slot: str) -> str:
        """The value of a slot, drawn at the first call."""
        if slot not in self.values:
            kind = slot.rstrip("0123456789")
            taken = {value for key, value in self.values.items() if key.rstrip("0123456789") == kind}
            self.values[slot] = self.rng.choice([value for value in KINDS[kind] if value not in taken])
        return self.values[slot]

    def fill(self, template: str) -> str:
        """The template with its slots' values."""
        return _SLOT.sub(self._value, template)

    def pick(self, templates: Sequence[str]) -> str:
        """One of the templates, filled."""
        return self.fill(self.rng.choice(templates))

    def _value(self, match: re.Match[str]) -> str:
        value = self.get(match[3])
        if match[2]:
            value = with_article(value)
        return capital(value) if match[1] else value


def template_words(node: Any) -> set[str]:
    """All words that stand in templates, in whatever tuples, lists or tables they lie."""
    if isinstance(node, str):
        return set(re.findall(r"[A-Za-z']+", _SLOT.sub(" ", node)))
    parts = [*node.keys(), *node.values()] if isinstance(node, dict) else node
    return set().union(*(template_words(part) for part in parts)) if parts else set()
