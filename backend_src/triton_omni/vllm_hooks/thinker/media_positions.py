# SPDX-License-Identifier: Apache-2.0
"""Where HF lays the media of a prompt: the order of pictures and sound in a video that is heard, and M-RoPE positions.

vLLM 0.32.0 differs from HF in three ways. It lays sound inside video one token early, loses tokens where pictures are
further apart than a chunk, and rounds times in another precision. Pure: knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class TimeScale:
    """How times of a video become positions; from the checkpoint."""

    per_second: int
    chunk_seconds: float

    @property
    def chunk(self) -> int:
        """Positions of one chunk, in which pictures come before their sound."""
        return int(self.per_second * self.chunk_seconds)


@dataclass(frozen=True)
class Placed:
    """One medium in a prompt whose placeholders are expanded."""

    begin: int
    """Index of its first token."""
    length: int
    grid: tuple[int, int, int] | None = None
    """Grid of pictures: time steps, rows and columns; None = sound."""
    second_per_grid: float = 1.0
    """Between two time steps; of an image it is of no effect."""
    is_heard: bool = False
    """True if a video's sound lies between its pictures, and a begin and an end token around both."""


def film_order(steps: int, size: int, sounds: int, second_per_grid: float, scale: TimeScale) -> NDArray[np.bool_]:
    """Return the tokens of a heard video that are pictures: bool [steps * size + sounds].

    Chunks of pictures and of sound alternate. Source: `replace_multimodal_special_tokens` of HF's processor. There a
    token begins at most one chunk: after a gap of several chunks the first tokens are chunks of their own.

    Args:
        steps: time steps.
        size: tokens of one.
        sounds: tokens of the sound.
        second_per_grid: seconds between two time steps.
        scale: of the checkpoint.
    """
    pictures, begun = [0], 1
    for time in np.arange(steps) * second_per_grid * scale.per_second:
        late = min(max(int(time // scale.chunk) + 1 - begun, 0), size)
        pictures += [1] * late
        pictures[-1] += size - late
        begun += late
    chunks = [min(scale.chunk, sounds - first) for first in range(0, sounds, scale.chunk)]
    longest = max(len(pictures), len(chunks))
    counts = np.zeros((longest, 2), np.int64)
    counts[: len(pictures), 0], counts[: len(chunks), 1] = pictures, chunks
    return np.repeat(np.tile([True, False], longest), counts.ravel())


def prompt_positions(tokens: Indices, media: Sequence[Placed], video_id: int, scale: TimeScale) -> Indices:
    """M-RoPE positions int64 [3, P] of a prompt. Source: `get_rope_index` of transformers.

    Args:
        tokens: the P ids.
        media: in the order of the prompt; a heard video is one of them, its sound is none.
        video_id: what stands for a video's picture.
        scale: of the checkpoint.
    """
    positions = np.empty((3, len(tokens)), np.int64)
    done = following = 0
    for medium in media:
        following = _lay_text(positions, done, medium.begin, following)
        done = medium.begin + medium.length
        here = positions[:, medium.begin : done]
        if medium.is_heard:
            is_picture = tokens[medium.begin + 1 : done - 1] == video_id
            following = _lay_film(here, is_picture, medium, following, scale)
        else:
            here[:] = following + _steps(medium, scale)
            following = int(here.max()) + 1
    _lay_text(positions, done, len(tokens), following)
    return positions


def _lay_text(positions: Indices, begin: int, end: int, following: int) -> int:
    positions[:, begin:end] = np.arange(following, following + end - begin)
    return following + end - begin


def _lay_film(here: Indices, is_picture: NDArray[np.bool_], film: Placed, following: int, scale: TimeScale) -> int:
    """Both begin tokens share a position, and both end tokens. Later positions continue from the last chunk."""
    inner = here[:, 1:-1]
    inner[:, is_picture] = following + _steps(film, scale)
    inner[:, ~is_picture] = following + np.arange(np.count_nonzero(~is_picture))
    others = np.flatnonzero(is_picture != is_picture[-1])
    end = int(inner[:, others[-1] + 1 if len(others) else 0 :].max()) + 1
    here[:, 0], here[:, -1] = following - 1, end
    return end


def _steps(medium: Placed, scale: TimeScale) -> Indices:
    """Positions [3, N] of a medium from 0 on: time, row and column of a picture's tokens, or thrice the index."""
    if medium.grid is None:
        return np.broadcast_to(np.arange(medium.length), (3, medium.length))
    indices = np.indices(medium.grid).reshape(3, -1)
    # In float32, as HF has it: a product near a whole number is cut off to another one in float64.
    times = indices[0].astype(np.float32) * np.float32(medium.second_per_grid) * np.float32(scale.per_second)
    indices[0] = times.astype(np.int64)
    return indices
