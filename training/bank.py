# SPDX-License-Identifier: Apache-2.0
"""The spoken sentences as the networks' training reads them: texts, tokens, codes, which token each code speaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from training.settings import Settings
from training.sizes import HOP

WAVE_FRAMES = 4 * 3600 * 100
"""Mel frames of a voice that are kept as samples, too: four hours, from which the vocoder learns."""
UNKNOWN = -1
"""In place of a token where flite's words are not the text's."""


@dataclass(frozen=True)
class Doc:
    """A reply: a chat's prompt and the sentences that answer it."""

    prompt: list[int]
    """Token ids, system prompt included."""
    sentences: list[int]
    """Numbers of sentences."""


@dataclass(frozen=True)
class VoiceCodes:
    """Speech of one voice; all sentences follow each other without a gap."""

    codes: Tensor
    """[N] int16, from 1 on."""
    start: Tensor
    """[S]: a sentence's first code."""
    length: Tensor
    """[S]: number of its codes."""
    first: Tensor
    """[N] int16: place of the token that each code speaks, the sentence being a reply's first; `UNKNOWN` if unknown."""
    later: Tensor
    """[N] int16: likewise, the sentence being a later one, which begins with a space."""


@dataclass(frozen=True)
class Bank:
    """All sentences, S of them."""

    texts: list[str]
    first: list[list[int]]
    """Token ids of a sentence that begins a reply."""
    later: list[list[int]]
    """Token ids of a sentence after others: with the space before it."""
    docs: list[Doc]
    voices: dict[str, VoiceCodes]
    """By flite's name of the voice."""


def save(settings: Settings, bank: Bank, name: str = "bank.pt") -> None:
    """Write a file of `WORK/data`, whole or not at all."""
    value: dict[str, Any] = {
        "texts": bank.texts,
        "first": bank.first,
        "later": bank.later,
        "docs": [(doc.prompt, doc.sentences) for doc in bank.docs],
        "voices": {name: vars(voice) for name, voice in bank.voices.items()},
    }
    new = settings.data / f"{name}.new"
    torch.save(value, new)
    new.replace(settings.data / name)


def load(settings: Settings, name: str = "bank.pt") -> Bank:
    """Read a file of `WORK/data`; FileNotFoundError before the stage `speech` has made it."""
    value = torch.load(settings.data / name, weights_only=True)
    return Bank(
        value["texts"],
        value["first"],
        value["later"],
        [Doc(prompt, sentences) for prompt, sentences in value["docs"]],
        {name: VoiceCodes(**voice) for name, voice in value["voices"].items()},
    )


def save_sound(settings: Settings, voice: str, wave: Tensor, mel: Tensor) -> None:
    """Keep a voice's mel frames [N * 2, 80] fp16, and of its samples [N * 480] int16 those of `WAVE_FRAMES`."""
    torch.save({"wave": wave[: WAVE_FRAMES * HOP].clone(), "mel": mel}, settings.data / f"sound_{voice}.pt")


def load_sound(settings: Settings, voice: str) -> tuple[Tensor, Tensor]:
    """Sound that `save_sound` kept: samples and mel frames, of which there may be more."""
    value = torch.load(settings.data / f"sound_{voice}.pt", weights_only=True, mmap=True)
    return value["wave"], value["mel"]
