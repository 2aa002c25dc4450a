# SPDX-License-Identifier: Apache-2.0
"""The tokenizer, trained on the small world, and chats as token ids in Qwen2.5-Omni's template.

`python -m training.tokens` writes tokenizer.json beside this file; the checkpoint gets a copy. States of earlier runs
know only the tokenizer that they were trained with: write it anew when training begins anew.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from training.sizes import SPECIAL_TOKENS, VOCAB
from training.world import chats, spoken
from training.world.chats import DEFAULT_SYSTEM_PROMPT, Chat

PATH = Path(__file__).parent / "tokenizer.json"
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's pre-tokeniser."""
IM_START, IM_END, END_OF_TEXT = (VOCAB.id_of(name) for name in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"))
_CACHED_LENGTH = 80
"""Texts up to this length, and system prompts, come so often that their ids are kept."""


@cache
def tokenizer() -> Tokenizer:
    """The checkpoint's tokenizer, from tokenizer.json."""
    return Tokenizer.from_file(str(PATH))


def train_tokenizer(chat_count: int = 6000) -> Tokenizer:
    """A byte-level BPE of `VOCAB.base` tokens from chats of the small world; equal arguments give equal merges."""
    found = Tokenizer(BPE())
    found.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated", invert=False)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    found.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCAB.base, initial_alphabet=alphabet, show_progress=False)
    found.train_from_iterator(_corpus(chat_count), trainer)
    found.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return found


def _corpus(chat_count: int) -> Iterator[str]:
    rng = random.Random(1)
    for _ in range(chat_count):
        chat = chats.chat(rng)
        yield from (text for turn in chat.turns for text in turn)
        yield spoken.loose_words(rng)
    yield from [DEFAULT_SYSTEM_PROMPT] * (chat_count // 8)
    yield from ["system\n", "user\n", "assistant\n"] * (chat_count // 20)


@dataclass
class Encoded:
    """A chat as token ids, and which of them the model has to predict."""

    ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """1 where the loss counts: replies and their ends."""

    def add(self, ids: list[int], counts: int) -> None:
        """Append ids that count, or do not."""
        self.ids += ids
        self.counts += [counts] * len(ids)


@lru_cache(maxsize=1 << 17)
def _kept(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(text).ids)


def encode(text: str) -> list[int]:
    """Ids of a text; spellings of special tokens become those."""
    return list(_kept(text)) if len(text) <= _CACHED_LENGTH else list(tokenizer().encode(text).ids)


@dataclass(frozen=True)
class Medium:
    """A picture, video or sound of a turn."""

    kind: Literal["image", "video", "audio"]
    tokens: int
    after: bool = False
    """After the turn's text instead of before."""

    @property
    def ids(self) -> list[int]:
        """Its ids: beginning, placeholders, end."""
        group = "audio" if self.kind == "audio" else "vision"
        ends = (VOCAB.id_of(f"<|{group}_{end}|>") for end in ("bos", "eos"))
        begin, end = ends
        return [begin, *[VOCAB.id_of(f"<|{self.kind.upper()}|>")] * self.tokens, end]


def encode_chat(chat: Chat, media: dict[int, Medium] | None = None) -> Encoded:
    """Ids of a whole chat, whose replies count; `media` are those of turns by their numbers."""
    out = Encoded()
    out.add([IM_START, *_kept(f"system\n{chat.system}"), IM_END, *_kept("\n")], 0)
    for place, (ask, reply) in enumerate(chat.turns):
        out.add([IM_START, *_user(ask, (media or {}).get(place)), IM_END], 0)
        out.add([*_kept("\n"), IM_START, *_kept("assistant\n")], 0)
        out.add([*encode(reply), IM_END], 1)
        out.add(list(_kept("\n")), 0)
    return out


def _user(ask: str, medium: Medium | None) -> list[int]:
    """Return the text of a user's turn. Runs of text between special tokens are tokenised whole, as the server does."""
    if medium is None:
        return encode(f"user\n{ask}")
    if medium.after:
        return [*encode(f"user\n{ask}"), *medium.ids]
    return [*_kept("user\n"), *medium.ids, *encode(ask)]


def encode_prompt(chat: Chat, media: dict[int, Medium] | None = None) -> list[int]:
    """Ids up to the last reply, which is left out."""
    out = encode_chat(chat, media)
    last = len(out.counts) - 1 - out.counts[::-1].index(1)
    while last and out.counts[last]:
        last -= 1
    return out.ids[: last + 1]


def decode(ids: list[int]) -> str:
    """Text of ids, special tokens left out."""
    return str(tokenizer().decode(ids, skip_special_tokens=True))


if __name__ == "__main__":
    train_tokenizer().save(str(PATH))
