# SPDX-License-Identifier: Apache-2.0
"""Rows of token ids for the thinker: chats, and chats about pictures and videos, made by many processes beforehand."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

from training.render import scene_numbers
from training.tokens import END_OF_TEXT, Encoded, Medium, encode_chat
from training.world import chats, scenes
from training.world.chats import DEFAULT_SYSTEM_PROMPT, Chat

TEXT_LENGTHS = (96, 176, 256)
"""Chats are padded to the shortest of these that holds them; longer ones are left out."""


@dataclass(frozen=True)
class Grid:
    """A picture's or video's size in tokens."""

    pairs: int
    """Number of pairs of frames."""
    height: int
    width: int

    @property
    def tokens(self) -> int:
        """Tokens of the whole medium."""
        return self.pairs * self.height * self.width


PICTURES = tuple(
    Grid(1, height, width) for height, width in ((6, 6), (5, 5), (5, 6), (6, 5), (4, 7), (7, 4), (5, 7), (4, 6))
)
"""Grids that `sizes.PICTURE_PIXELS` makes of squares, large and small, and of 4:3, 3:2 and 16:9."""
VIDEOS = (Grid(2, 12, 12), Grid(2, 10, 14), Grid(3, 10, 14), Grid(4, 12, 12))
"""Grids that the least size of a video's frame makes of small videos; two to four seconds."""
PICTURE_LENGTH = 160
VIDEO_TEXT = 112
"""Tokens beside a video's own."""


@dataclass(frozen=True)
class Rows:
    """Padded rows, N of length L."""

    ids: NDArray[np.int16]
    """[N, L]"""
    counts: NDArray[np.bool_]
    """[N, L]: tokens that the model has to predict."""

    def __len__(self) -> int:
        return len(self.ids)

    def at(self, index: NDArray[np.int64]) -> Self:
        """Some of the rows."""
        return type(self)(**{item.name: getattr(self, item.name)[index] for item in fields(self)})

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The rows of several tables."""
        return cls(**{item.name: np.concatenate([getattr(part, item.name) for part in parts]) for item in fields(cls)})


@dataclass(frozen=True)
class SceneRows(Rows):
    """Rows about one picture or video each."""

    begin: NDArray[np.int64]
    """[N]: place of the first token of the picture."""
    things: NDArray[np.float32]
    """[N, K, 14] and [N, 5]: `render.SceneTable`."""
    grounds: NDArray[np.float32]
    seconds: NDArray[np.float32]
    """[N]: between two pairs of frames."""


def padded(encoded: Sequence[Encoded], length: int) -> tuple[NDArray[np.int16], NDArray[np.bool_]]:
    """Ids and counts [N, length] of rows, none of which is longer."""
    ids = np.full((len(encoded), length), END_OF_TEXT, np.int16)
    counts = np.zeros((len(encoded), length), np.bool_)
    for place, row in enumerate(encoded):
        ids[place, : len(row.ids)] = row.ids
        counts[place, : len(row.counts)] = row.counts
    return ids, counts


def text_rows(job: tuple[int, int]) -> dict[int, Rows]:
    """Rows by their length of `count` chats drawn from `seed`."""
    seed, count = job
    rng = random.Random(f"text {seed}")
    found: dict[int, list[Encoded]] = {length: [] for length in TEXT_LENGTHS}
    for _ in range(count):
        row = encode_chat(chats.chat(rng))
        fitting = [length for length in TEXT_LENGTHS if len(row.ids) <= length]
        if fitting:
            found[fitting[0]].append(row)
    return {length: Rows(*padded(rows, length)) for length, rows in found.items()}


def scene_rows(job: tuple[int, int, Grid]) -> SceneRows:
    """Rows about `count` pictures, or videos where the grid has several pairs, drawn from `seed`."""
    seed, count, grid = job
    rng = random.Random(f"scene {seed} {grid}")
    length = row_length(grid)
    rows: list[Encoded] = []
    numbers, seconds = [], []
    while len(rows) < count:
        scene = scenes.picture(rng) if grid.pairs == 1 else scenes.video(rng)
        row = encode_chat(*scene_chat(rng, scene, grid))
        if len(row.ids) <= length:
            rows.append(row)
            numbers.append(scene_numbers(scene))
            seconds.append(rng.choice((1.0, 1.0, rng.uniform(0.5, 1.5))))
    ids, counts = padded(rows, length)
    begin = np.isin(ids, Medium("image", 1).ids[1:2] + Medium("video", 1).ids[1:2]).argmax(1)
    things, grounds = (np.stack(part) for part in zip(*numbers, strict=True))
    return SceneRows(ids, counts, begin, things, grounds, np.array(seconds, np.float32))


def row_length(grid: Grid) -> int:
    """Length of the rows about pictures or videos of a size."""
    return PICTURE_LENGTH if grid.pairs == 1 else grid.tokens + VIDEO_TEXT


def scene_chat(rng: random.Random, scene: scenes.Scene, grid: Grid) -> tuple[Chat, dict[int, Medium]]:
    """A chat about a scene, which is in its first turn."""
    one_word = rng.random() < 0.08
    turns = scenes.scene_turns(rng, scene, one_word=one_word)
    draw = rng.random()
    system = DEFAULT_SYSTEM_PROMPT if draw < 0.92 else rng.choice(chats.SYSTEMS)
    if one_word:
        system = rng.choice((chats.ONE_WORD[0], f"{DEFAULT_SYSTEM_PROMPT} {chats.ONE_WORD[0]}"))
    medium = Medium("image" if grid.pairs == 1 else "video", grid.tokens, after=rng.random() < 0.3)
    return Chat(medium.kind, tuple((chats.vary(rng, ask) if ask else "", reply) for ask, reply in turns), system), {
        0: medium
    }


@dataclass(frozen=True)
class Counts:
    """How many rows are made."""

    chats: int
    pictures: int
    """Number for each grid."""
    videos: int
    """Number for each grid."""
    grids: tuple[Grid, ...] = (*PICTURES, *VIDEOS)


FULL_COUNTS = Counts(900_000, 30_000, 20_000)
TOY_COUNTS = Counts(120, 6, 2, (PICTURES[1], VIDEOS[1]))


@dataclass(frozen=True)
class Tables:
    """All rows that are made beforehand."""

    texts: dict[int, Rows]
    """By length."""
    scenes: dict[Grid, SceneRows]


def make_tables(seed: int, counts: Counts, workers: int) -> Tables:
    """Make all rows; equal arguments give equal rows in another order of processes, too."""
    pieces = max(1, min(workers * 4, counts.chats // 60))
    texts = [(seed * 100_003 + piece, counts.chats // pieces) for piece in range(pieces)]
    shares = max(1, min(8, counts.videos // 100))
    grids = [
        (seed * 100_003 + share, (counts.pictures if grid.pairs == 1 else counts.videos) // shares, grid)
        for grid in counts.grids
        for share in range(shares)
    ]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if workers == 1:
        return _collect(map(text_rows, texts), map(scene_rows, grids), grids)
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        return _collect(pool.imap(text_rows, texts), pool.imap(scene_rows, grids), grids)


def _collect(
    texts: Iterator[dict[int, Rows]], found: Iterator[SceneRows], grids: Sequence[tuple[int, int, Grid]]
) -> Tables:
    parts = list(texts)
    by_grid: dict[Grid, list[SceneRows]] = {}
    for (_, _, grid), rows in zip(grids, found, strict=True):
        by_grid.setdefault(grid, []).append(rows)
    return Tables(
        {length: Rows.joined([part[length] for part in parts]) for length in TEXT_LENGTHS},
        {grid: SceneRows.joined(rows) for grid, rows in by_grid.items()},
    )
