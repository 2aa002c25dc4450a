# SPDX-License-Identifier: Apache-2.0
"""Times of a video's pictures, and the choice of those that the model sees. Pure: knows no codec and no file.

Every figure comes from the time stamps of the pictures. If they confirm the container's rate, pictures are chosen by
number, as qwen-omni-utils does; otherwise they are chosen by time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from triton_omni.core.errors import BadRequest

FPS = 2.0
"""Pictures a second that the model sees, unless a request says otherwise."""
FRAME_FACTOR = 2
"""Frames are merged in pairs, so their number is even."""
MIN_FRAMES = 4
STILL_SECONDS = 1.0
"""A picture shown so much longer than at an even rate is a still. Sound may outlast a last picture by less:
encoders pad it to whole packets."""
EVEN_WITHIN = 0.4
"""Fraction of a picture's duration by which a constant rate may miss the time stamps. A single lost picture moves
others further.
"""


@dataclass(frozen=True)
class Timeline:
    """The pictures of a video in the order in which they are shown."""

    times: tuple[float, ...]
    """Seconds from the beginning of the video, ascending; the first picture is shown from the beginning in any case."""
    seconds: float
    """From the beginning to the end of the last picture."""
    is_even: bool
    """True if the pictures are shown at one rate."""

    @classmethod
    def of(cls, times: Sequence[float], end: float, stated_rate: float | None) -> Timeline:
        """The timeline of pictures with time stamps.

        Args:
            times: seconds from the beginning of the video, ascending, at least one.
            end: end of the last picture in seconds, by the file.
            stated_rate: pictures a second that the container states.
        """
        rate = _even_rate(times, stated_rate)
        length = len(times) / rate if rate else 0.0
        is_even = rate is not None and times[0] + end - length <= STILL_SECONDS
        if is_even and rate == stated_rate:
            return cls(tuple(times), length, is_even)
        # Rounded to less than a picture: 2.999 s of time stamps are 3 s.
        return cls(tuple(times), round(end, 2), is_even)

    def choose(self, count: int) -> tuple[int, ...]:
        """Return the numbers of `count` pictures, ascending; a picture that is shown for long comes several times."""
        if self.is_even:
            numbers = torch.linspace(0, len(self.times) - 1, count).round().long()
            return tuple(numbers.tolist())
        asked = np.arange(count) * (self.seconds / count)
        # Rounding must not hide a picture whose stamp equals the wanted time.
        latest = np.searchsorted(np.array(self.times), asked + 1e-6, side="right") - 1
        return tuple(max(int(number), 0) for number in latest)

    def count(self, fps: float, most: int) -> int:
        """Return the number of chosen pictures: `fps` a second, at least 4, even, at most `most`.

        Raises:
            BadRequest: fewer than two pictures, or a single one that is shown for less than a second.
        """
        may_repeat = not self.is_even and self.seconds >= STILL_SECONDS
        return _count(len(self.times), self.seconds, most, fps, may_repeat=may_repeat)


def frame_count(total: int, source_fps: float, most: int, fps: float = FPS) -> int:
    """Return the number of sampled frames: `fps` a second, at least 4, even (`smart_nframes` of qwen-vl-utils).

    Raises:
        BadRequest: fewer than two frames.
    """
    return _count(total, total / source_fps, most, fps)


def _count(total: int, seconds: float, most: int, fps: float, *, may_repeat: bool = False) -> int:
    if total < FRAME_FACTOR and not may_repeat:
        raise BadRequest(f"{total} frames, at least {FRAME_FACTOR} are needed")
    count = min(max(seconds * fps, MIN_FRAMES), most, math.inf if may_repeat else total)
    return math.floor(count / FRAME_FACTOR) * FRAME_FACTOR


def median_gap(times: Sequence[float]) -> float:
    """Seconds between two pictures, by the median; 0 for a single one."""
    return float(np.median(np.diff(times))) if len(times) > 1 else 0.0


def _even_rate(times: Sequence[float], stated: float | None) -> float | None:
    """Return the rate that shows each picture near its stamp: the stated one, the mean, or None."""
    stamps = np.array(times) - times[0]
    numbers = np.arange(len(times))
    mean = float(numbers[-1] / stamps[-1]) if stamps[-1] > 0 else None
    for rate in (stated, mean):
        if rate is not None and np.abs(stamps * rate - numbers).max() < EVEN_WITHIN:
            return rate
    return None
