# SPDX-License-Identifier: Apache-2.0
"""Training data of the talker: spoken replies put together from the bank's sentences, in batches of few shapes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from training import bank
from training.bank import UNKNOWN, Bank
from training.settings import Settings
from training.sizes import VOCAB, VOICES
from training.tokens import END_OF_TEXT, encode_prompt
from training.world import chats, spoken

NO_TARGET = -100
LONGEST, LONGEST_TOY = 1550, 200
"""Codes of a reply; 1500 are 30 s."""
EXTRA_ROWS = 3
"""Rows after a reply's: text eos, text pad, the speaker's text bos."""
_DOCS_PART = 0.5
"""Part of the samples that are replies of the small world; the rest are sentences in any order."""
_COUNTS = (1, 1, 1, 2, 2, 3, 5, 8)
_LENGTHS, _LENGTHS_TOY = (192, 288, 384, 512, 704, 960, 1280, 1792), (160, 384)
"""Lengths of the talker's sequences; each batch has one of them."""
_SAMPLES_A_BANK = 300
"""Samples from one bank before another is drawn."""
_SHARDS_KEPT = 200


@dataclass(frozen=True)
class Shape:
    """Shape of a batch."""

    rows: int
    length: int
    """Positions of the talker."""
    texts: int
    """Positions of the thinker."""

    def holds(self, sample: Sample) -> bool:
        """Return True if a sample fits in a row."""
        return sample.length <= self.length and len(sample.prompt) + len(sample.reply) <= self.texts


def shapes(positions: int, *, toy: bool) -> list[Shape]:
    """All shapes, the shortest first, of about so many positions each."""
    lengths = _LENGTHS_TOY if toy else _LENGTHS
    return [Shape(max(1, positions // length), length, max(256, length // 2)) for length in lengths]


@dataclass(frozen=True)
class Sample:
    """One spoken reply."""

    prompt: list[int]
    """Token ids of the chat up to the reply."""
    reply: list[int]
    """Token ids; fewer than codes."""
    codes: NDArray[np.int64]
    spoken: NDArray[np.int64]
    """Place in `reply` of the token that each code speaks; `UNKNOWN` if unknown."""
    bos: int
    """Text id of the speaker's beginning of speech."""
    kept: int
    """Rows of the prompt's end that the talker gets; a server gives it all of them."""
    gap: int
    """Positions left out before the reply: pictures and sounds make prompts longer in time than in rows."""

    @property
    def length(self) -> int:
        """Positions of the talker's sequence: prompt, speaker, beginning, codes."""
        return self.kept + 2 + len(self.codes)


@dataclass(frozen=True)
class Batch:
    """Padded samples: B of them, T text positions, L positions of the talker."""

    ids: Tensor
    """[B, T]: prompts and replies as the thinker reads them."""
    row: Tensor
    """[B, L]: which of the thinker's rows, T + 0 to T + 2 being `EXTRA_ROWS`."""
    code: Tensor
    """[B, L]: the codec id that is added to the row."""
    has_code: Tensor
    """[B, L] bool: whether one is added."""
    target: Tensor
    """[B, L]: the next code, or `NO_TARGET`."""
    attend: Tensor
    """[B, L]: position of the token that the next code speaks, or `UNKNOWN`."""
    position: Tensor
    """[B, L]"""
    bos: Tensor
    """[B]"""

    def to(self, device: torch.device) -> Batch:
        """On a device, integers as int64."""
        moved = {field.name: getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)}
        return Batch(**{name: value if value.dtype == torch.bool else value.long() for name, value in moved.items()})

    def copy_(self, other: Batch) -> None:
        """Take over another batch's values; it has the same shape, and may lie elsewhere in smaller types."""
        for field in fields(self):
            getattr(self, field.name).copy_(getattr(other, field.name), non_blocking=True)


class Replies(IterableDataset):  # type: ignore[misc]
    """Endless batches; each worker of a loader draws others.

    Args:
        settings: where the bank is.
        positions: of a batch, padding included.
        start: steps before this run, which has other samples.
    """

    def __init__(self, settings: Settings, positions: int, start: int) -> None:
        super().__init__()
        self._settings, self._positions, self._start = settings, positions, start

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        number = worker.id if worker else 0
        rng = random.Random(f"{self._settings.seed} {self._start} {number}")
        found = shapes(self._positions, toy=self._settings.toy)
        for shape, samples in grouped(self._samples(rng), found):
            yield collate(samples, shape)

    def _samples(self, rng: random.Random) -> Iterator[Sample]:
        banks, longest = Banks(self._settings), LONGEST_TOY if self._settings.toy else LONGEST
        while True:
            stored = banks.draw(rng)
            for _ in range(_SAMPLES_A_BANK):
                if sample := draw(stored, rng, longest):
                    yield sample


class Banks:
    """The bank of the stage `speech` and what the stage `more` adds while the talker trains."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loaded = {"bank.pt": bank.load(settings)}

    def draw(self, rng: random.Random) -> Bank:
        """A bank, those with more sentences more often."""
        for path in sorted(self._settings.data.glob("more_*.pt"))[-_SHARDS_KEPT:]:
            if path.name not in self._loaded:
                self._loaded[path.name] = bank.load(self._settings, path.name)
        newest = ["bank.pt", *[name for name in self._loaded if name != "bank.pt"][-_SHARDS_KEPT:]]
        self._loaded = {name: self._loaded[name] for name in newest}
        banks = list(self._loaded.values())
        return rng.choices(banks, [len(one.texts) for one in banks])[0]


def draw(stored: Bank, rng: random.Random, longest: int) -> Sample | None:
    """A reply of at most about `longest` codes in one voice; None if it has hardly any codes for its tokens."""
    if stored.docs and rng.random() < _DOCS_PART:
        doc = rng.choice(stored.docs)
        prompt, numbers = doc.prompt, doc.sentences
    else:
        numbers = [rng.randrange(len(stored.texts)) for _ in range(rng.choice(_COUNTS))]
        text = " ".join(stored.texts[number] for number in numbers)
        prompt = encode_prompt(chats.Chat("say", ((rng.choice(spoken.ASKS).format(text), text),)))
    voice = rng.choice(VOICES)
    reply, codes, said = _joined(stored, voice.flite, numbers, longest)
    if len(reply) >= len(codes):
        return None
    kept = len(prompt) if rng.random() < 0.3 else rng.randint(2, min(48, len(prompt)))
    gap = 0 if rng.random() < 0.6 else rng.randint(1, 400)
    return Sample(prompt, reply, codes, said, voice.bos, kept, gap)


def _joined(
    stored: Bank, flite: str, numbers: Sequence[int], longest: int
) -> tuple[list[int], NDArray[np.int64], NDArray[np.int64]]:
    """Tokens, codes, and what each code speaks, of sentences in a row; those beyond `longest` are left out."""
    voice = stored.voices[flite]
    reply: list[int] = []
    codes: list[NDArray[np.int64]] = []
    said: list[NDArray[np.int64]] = []
    for place, number in enumerate(numbers):
        start, length = int(voice.start[number]), int(voice.length[number])
        if place and sum(map(len, codes)) + length > longest:
            break
        where = (voice.later if place else voice.first)[start : start + length].long().numpy()
        said.append(np.where(where == UNKNOWN, UNKNOWN, where + len(reply)))
        codes.append(voice.codes[start : start + length].long().numpy())
        reply = reply + (stored.later if place else stored.first)[number]
    return reply, np.concatenate(codes), np.concatenate(said)


def grouped(samples: Iterable[Sample], found: Sequence[Shape]) -> Iterator[tuple[Shape, list[Sample]]]:
    """Samples by the first shape that holds them, whenever there are enough for a batch; others are left out."""
    waiting: dict[Shape, list[Sample]] = {shape: [] for shape in found}
    for sample in samples:
        shape = next((shape for shape in found if shape.holds(sample)), None)
        if shape is not None:
            waiting[shape].append(sample)
            if len(waiting[shape]) == shape.rows:
                yield shape, waiting[shape]
                waiting[shape] = []


def collate(samples: Sequence[Sample], shape: Shape) -> Batch:
    """Samples side by side, in small types: they go through shared memory."""
    rows, length, texts = shape.rows, shape.length, shape.texts
    ids = np.full((rows, texts), END_OF_TEXT, np.int16)
    row = np.full((rows, length), texts + 1, np.int16)  # the pad's
    code = np.zeros((rows, length), np.int16)
    has_code = np.zeros((rows, length), bool)
    target = np.full((rows, length), NO_TARGET, np.int16)
    attend = np.full((rows, length), UNKNOWN, np.int16)
    position = np.tile(np.arange(length, dtype=np.int16), (rows, 1))
    for number, sample in enumerate(samples):
        prompt, tokens, codes, kept = len(sample.prompt), len(sample.reply), len(sample.codes), sample.kept
        ids[number, : prompt + tokens] = sample.prompt + sample.reply
        first = kept + 1
        row[number, :kept] = np.arange(prompt - kept, prompt)
        row[number, kept] = texts + 2
        row[number, first : first + tokens] = np.arange(prompt, prompt + tokens)
        row[number, first + tokens] = texts
        code[number, kept], code[number, first] = VOCAB.codec_pad, VOCAB.codec_bos
        code[number, first + 1 : first + 1 + codes] = sample.codes
        has_code[number, kept : first + 1 + codes] = True
        target[number, first : first + codes], target[number, first + codes] = sample.codes, VOCAB.codec_eos
        attend[number, first : first + codes] = np.where(sample.spoken == UNKNOWN, UNKNOWN, sample.spoken + first)
        position[number, kept:] += sample.gap
    bos = np.array([sample.bos for sample in samples])
    return Batch(*(torch.from_numpy(array) for array in (ids, row, code, has_code, target, attend, position, bos)))
