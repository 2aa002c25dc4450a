# SPDX-License-Identifier: Apache-2.0
"""A simulated player: what a listener would have heard of chunks that came when they came.

Pure arithmetic over arrival times. It starts with the first chunk, plays in real time, and falls silent when it
has played all that has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .records import Chunk


@dataclass(frozen=True)
class Playback:
    """How a reply would have sounded."""

    underruns: int
    """How often the player fell silent before the speech was over."""
    silence_s: float
    """For how long in all. A player that had waited this long before it began would have played without a gap."""
    longest_silence_s: float
    over_s: float
    """When all was played, in seconds after the request's start; 0 without speech."""


def play(chunks: Sequence[Chunk]) -> Playback:
    """Play chunks in the order in which they came.

    After a silence the player goes on with the late chunk at once, so every silence puts off all that follows. A chunk
    that comes in the very moment in which the one before ends is in time; the end of the last chunk is no underrun.
    """
    silences: list[float] = []
    played_until = chunks[0].at_s if chunks else 0.0
    for chunk in chunks:
        if chunk.at_s > played_until:
            silences.append(chunk.at_s - played_until)
            played_until = chunk.at_s
        played_until += chunk.seconds
    return Playback(len(silences), sum(silences), max(silences, default=0.0), played_until)
