# SPDX-License-Identifier: Apache-2.0
"""Exam of the voices: sentences and stories that no stage has seen, the same ones every time."""

from __future__ import annotations

import random
from dataclasses import dataclass

from training.sizes import VOICES, Voice
from training.speech import is_test
from training.tokens import encode, encode_prompt
from training.world import chats, spoken, stories

_SEED = 2026
SENTENCES, STORIES = 24, 4
"""A voice's sentences and stories."""


@dataclass(frozen=True)
class Task:
    """A text to be spoken."""

    name: str
    """Name of its files: kind, voice, number."""
    text: str
    voice: Voice
    prompt: list[int]
    """Token ids of the chat up to the reply."""

    @property
    def reply(self) -> list[int]:
        """Token ids of the text."""
        return encode(self.text)


def sentences() -> list[str]:
    """Sentences that training leaves out."""
    rng = random.Random(_SEED)
    found: list[str] = []
    while len(found) < SENTENCES:
        text = spoken.sentence(rng)
        if is_test(text) and text not in found:
            found.append(text)
    return found


def tasks() -> list[Task]:
    """All texts in all voices: `say` for sentences, `story` for stories of up to half a minute."""
    rng = random.Random(_SEED)
    texts = sentences()
    asked = [stories.asked_story(rng) for _ in range(STORIES)]
    found = []
    for voice in VOICES:
        for number, text in enumerate(texts):
            prompt = encode_prompt(chats.Chat("say", ((f"Say: {text}", text),)))
            found.append(Task(f"say_{voice.name}_{number:02d}", text, voice, prompt))
        for number, (ask, told) in enumerate(asked):
            text = " ".join(told)
            prompt = encode_prompt(chats.Chat("story", ((ask, text),)))
            found.append(Task(f"story_{voice.name}_{number:02d}", text, voice, prompt))
    return found
