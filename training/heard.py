# SPDX-License-Identifier: Apache-2.0
"""Rows about sounds: spoken prompts are put together anew for every batch, with other pauses, speeds and questions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training import prompts
from training.flite import SPEECH_RATE
from training.forward import audio_tokens
from training.prompts import Clip
from training.rows import padded
from training.sizes import VOCAB
from training.sound import FRAME
from training.tokens import Encoded, Medium, encode_chat
from training.world import chats, facts, voiced
from training.world.chats import DEFAULT_SYSTEM_PROMPT, Chat
from training.world.talk import Turn

AUDIO = VOCAB.id_of("<|AUDIO|>")
SILENCE = AUDIO
"""Label of a position at which no token is heard."""
IGNORED = -100
_TOKEN_SECONDS = 0.04
_MAX_PAUSE = 0.8
_FASTEST, _SLOWEST = 1.2, 0.84


class Store:
    """The samples of all clips on the device, and the clips, which a loader's thread may read meanwhile."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        self.samples = torch.zeros(capacity, dtype=torch.int16, device=device)
        self.short: list[tuple[Clip, int]] = []
        """Clips of at most 3.4 s, and where their samples begin."""
        self.long: list[tuple[Clip, int]] = []
        self._used = 0
        self._known: set[Path] = set()

    def __len__(self) -> int:
        return len(self.short) + len(self.long)

    def load_new(self, folder: Path, files: int) -> None:
        """Take clips of up to `files` new files; what no longer fits is left out."""
        for path in [path for path in sorted(folder.glob("*.pkl")) if path not in self._known][:files]:
            self._known.add(path)
            self.add(prompts.read(path))

    def add(self, clips: Sequence[Clip]) -> None:
        """Take clips."""
        for clip in clips:
            end = self._used + len(clip.samples)
            if end > len(self.samples):
                return
            self.samples[self._used : end] = torch.from_numpy(clip.samples)
            is_short = len(clip.samples) <= 3.4 * SPEECH_RATE
            (self.short if is_short else self.long).append((clip, self._used))
            self._used = end


@dataclass(frozen=True)
class HeardBatch:
    """Rows about one or more sounds each, on the CPU. B rows, B x S sounds."""

    ids: NDArray[np.int16]
    counts: NDArray[np.bool_]
    source: NDArray[np.int64]
    """[B, L]: at a sound's token its position among those of the row's sounds, else -1."""
    begin: NDArray[np.int64]
    """[B * S] as in `Cuts`."""
    length: NDArray[np.int64]
    speed: NDArray[np.float64]
    lead: NDArray[np.int64]
    frames: NDArray[np.int64]
    """[B * S]: mel frames."""
    token_labels: NDArray[np.int64]
    """[B * S, F / 4]"""
    phone_labels: NDArray[np.int64]


@dataclass(frozen=True)
class Sound:
    """A clip with pauses around it, at some speed."""

    clip: Clip
    begin: int
    speed: float
    lead: int
    samples: int
    """Samples of the whole sound."""

    @property
    def frames(self) -> int:
        """Mel frames, as Whisper's extractor counts them."""
        return -(-self.samples // FRAME)

    @property
    def tokens(self) -> int:
        """Its placeholders in a prompt."""
        return audio_tokens(self.frames)


def placed(rng: random.Random, clip: Clip, begin: int, most: int) -> Sound | None:
    """A clip with random pauses and speed; None if that is longer than `most` samples."""
    speed = 1.0 if rng.random() < 0.3 else rng.uniform(_SLOWEST, _FASTEST)
    lead, rest = (int(rng.uniform(0, _MAX_PAUSE) * SPEECH_RATE * (rng.random() < 0.7)) for _ in range(2))
    spoken = int(len(clip.samples) / speed)
    room = most - spoken
    if room < 0:
        return None
    lead = min(lead, room)
    return Sound(clip, begin, speed, lead, lead + spoken + min(rest, room - lead))


def labels(sound: Sound, positions: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The token and the phone that are heard at each position [positions]; IGNORED after the sound's end."""
    out = ((np.arange(positions) + 0.5) * _TOKEN_SECONDS - sound.lead / SPEECH_RATE) * sound.speed
    clip = sound.clip
    which = np.searchsorted(clip.token_times[:, 0], out, side="right") - 1
    heard = (which >= 0) & (out < clip.token_times[which.clip(0), 1])
    tokens = np.where(heard, clip.tokens[which.clip(0)], SILENCE)
    place = np.searchsorted(clip.phone_ends, out, side="right")
    spoken = (out > 0) & (place < len(clip.phones))
    phones = np.where(spoken, clip.phones[place.clip(0, len(clip.phones) - 1)], 0)
    after = np.arange(positions) >= sound.tokens
    return np.where(after, IGNORED, tokens), np.where(after, IGNORED, phones)


def heard_batch(
    rng: random.Random, clips: Sequence[tuple[Clip, int]], *, size: int, sounds: int, frames: int, length: int
) -> HeardBatch:
    """Rows about `sounds` clips each, of at most `frames` mel frames a sound and `length` tokens a row."""
    rows: list[Encoded] = []
    heard: list[list[Sound]] = []
    while len(rows) < size:
        chosen = [placed(rng, *rng.choice(clips), frames * FRAME) for _ in range(sounds)]
        if None in chosen:
            continue
        kept = [sound for sound in chosen if sound is not None]
        row = encode_chat(*sound_chat(rng, kept))
        if len(row.ids) <= length:
            rows.append(row)
            heard.append(kept)
    ids, counts = padded(rows, length)
    flat = [sound for row in heard for sound in row]
    tokens, phones = (np.stack(part) for part in zip(*(labels(sound, frames // 4) for sound in flat), strict=True))
    return HeardBatch(
        ids,
        counts,
        _sources(ids, heard, frames // 4),
        np.array([sound.begin for sound in flat]),
        np.array([len(sound.clip.samples) for sound in flat]),
        np.array([sound.speed for sound in flat]),
        np.array([sound.lead for sound in flat]),
        np.array([sound.frames for sound in flat]),
        tokens,
        phones,
    )


def _sources(ids: NDArray[np.int16], heard: Sequence[Sequence[Sound]], positions: int) -> NDArray[np.int64]:
    source = np.full(ids.shape, -1, np.int64)
    for row, (own, sounds) in enumerate(zip(ids, heard, strict=True)):
        places = [np.arange(sound.tokens) + number * positions for number, sound in enumerate(sounds)]
        source[row, own == AUDIO] = np.concatenate(places)
    return source


def sound_chat(rng: random.Random, sounds: Sequence[Sound]) -> tuple[Chat, dict[int, Medium]]:
    """A chat in which each sound is a turn; written turns may come before or after."""
    system = DEFAULT_SYSTEM_PROMPT if rng.random() < 0.92 else rng.choice(chats.SYSTEMS)
    first = sounds[0].clip.prompt
    if len(sounds) == 1 and first.word and rng.random() < 0.12:
        system = rng.choice((chats.ONE_WORD[0], f"{DEFAULT_SYSTEM_PROMPT} {chats.ONE_WORD[0]}"))
        return Chat("audio", (("", first.word),), system), {0: Medium("audio", sounds[0].tokens)}
    turns: list[Turn] = []
    media: dict[int, Medium] = {}
    if rng.random() < 0.1:
        turns.append(_written(rng))
    for sound in sounds:
        written_down = sound.clip.prompt.reply is None or rng.random() < 0.3
        ask = rng.choice(voiced.WRITE_DOWN) if written_down else ""
        media[len(turns)] = Medium("audio", sound.tokens, after=bool(ask) and rng.random() < 0.4)
        turns.append((ask, sound.clip.prompt.text if written_down else str(sound.clip.prompt.reply)))
    last = sounds[-1].clip.prompt
    if last.follow and rng.random() < 0.6:
        turns += last.follow
    elif rng.random() < 0.1:
        turns.append(_written(rng))
    return Chat("audio", tuple(turns), system), media


def _written(rng: random.Random) -> Turn:
    found = facts.fact(rng)
    return found.ask, found.reply


def gather_rows(rows: Tensor, source: Tensor, embeds: Tensor) -> Tensor:
    """Token embeddings [B, L, hidden] with media's rows [B, P, hidden] where `source` [B, L] is not -1."""
    taken = rows.gather(1, source.clamp(min=0).unsqueeze(-1).expand(-1, -1, rows.shape[-1]))
    return torch.where(source.unsqueeze(-1) >= 0, taken.to(embeds.dtype), embeds)
