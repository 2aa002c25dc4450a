# SPDX-License-Identifier: Apache-2.0
"""How many GPUs a load needs and what its speech costs, by what was measured. Pure; all arithmetic is exact.

A closed loop of C streams shows what a server does with C replies always open. A loop of N listeners shows that it
holds N of them; what it could make beside that stays unknown, so their hearing alone counts as speech. The largest
measured load that meets the targets counts, and only if every smaller one does too. A conversation in which the model
speaks for a share d of the time needs d seconds of speech a second; by Little's law it then holds d × real-time factor
streams open.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from triton_omni_client.errors import BadRequest

MINUTES = 1000
"""Minutes of speech that the cost is for."""
_LENGTHS_DIFFER = Fraction(1, 10)
"""From this on a benchmark of replies of one length says little of those of another."""


@dataclass(frozen=True, kw_only=True)
class Targets:
    """Targets of a load.

    Raises:
        BadRequest: a value is impossible.
    """

    first_audio_p95_s: float
    """Time to first audio of 95 % of all replies, in seconds."""
    underruns: float = 0.0
    """Share of replies that may fall silent in the middle, 0 to 1."""

    def __post_init__(self) -> None:
        if not self.first_audio_p95_s > 0:
            raise BadRequest(f"the target of first audio must be over 0 s (got {self.first_audio_p95_s:g})")
        if not 0 <= self.underruns <= 1:
            raise BadRequest(f"the allowed share of replies with underruns is 0 to 1 (got {self.underruns:g})")


@dataclass(frozen=True)
class Measured:
    """One load as far as it counts here; of several runs each figure is the median."""

    streams: int
    """Places of the closed loop: replies open at once, or listeners."""
    first_audio_p95_s: Fraction | None
    """None = too few replies for it."""
    underruns: Fraction
    """Share of replies with one."""
    speech_per_s: Fraction
    """Seconds of speech a second, of all streams; of listeners what they hear while all of them are there."""
    reply_s: Fraction
    """Mean length of a reply's speech, in seconds."""
    failed: int
    """Requests that failed, of all runs."""
    replies: int
    """Replies of a run, of the run with the fewest."""
    all_listened_s: float | None = None
    """Seconds in which all listeners listened at once; None = no listeners, replies were always open."""
    runs: int = 1

    def misses(self, targets: Targets) -> str | None:
        """Why this load is too much, or cannot be judged; None = it meets the targets."""
        if self.failed:
            return f"{self.failed} requests failed"
        if self.first_audio_p95_s is None:
            return f"{self.replies} replies, and a p95 needs 20: measure with --requests 20 or more"
        if self.first_audio_p95_s > exact(targets.first_audio_p95_s):
            late = f"first audio p95 {float(self.first_audio_p95_s):.3g} s{self._of_runs}"
            return f"{late}, over {targets.first_audio_p95_s:g} s"
        if self.underruns > exact(targets.underruns):
            silent = float(100 * self.underruns)
            return f"{silent:.3g} % of replies with underruns{self._of_runs}, over {100 * targets.underruns:g} %"
        if self.all_listened_s is not None and self.all_listened_s < self.reply_s / 2:
            together = f"all of them listened at once for {self.all_listened_s:.3g} s, less than half a reply"
            return f"{together}: measure with more --requests or a shorter --ramp-up"
        return None

    @property
    def _of_runs(self) -> str:
        return f" (median of {self.runs} runs)" if self.runs > 1 else ""


@dataclass(frozen=True)
class Capacity:
    """Capacity of one GPU within the targets."""

    streams: Fraction
    speech_per_s: Fraction
    reply_s: Fraction
    limit: str | None
    """Target that the next larger load missed; None = no larger load was measured."""
    listens: bool = False
    """True if `streams` are listeners."""
    runs: int = 1
    """Runs of the load that counts."""
    together: int = 1
    """GPUs of the servers that were measured."""

    @property
    def gpu_hours(self) -> Fraction:
        """GPU hours for `MINUTES` of speech at full use."""
        return Fraction(MINUTES * 60) / self.speech_per_s / 3600

    def replies_an_hour(self, seconds: float) -> Fraction:
        """Replies of `seconds` of speech that one GPU makes in an hour at full use."""
        return self.speech_per_s * 3600 / exact(seconds)

    def is_of_length(self, seconds: float) -> bool:
        """True if replies of `seconds` are about as long as the measured ones."""
        return abs(exact(seconds) - self.reply_s) <= _LENGTHS_DIFFER * self.reply_s

    def gpus(self, conversations: int, speaking: float, headroom: float = 0.0) -> int:
        """GPUs for so many conversations at once, in whole set-ups as measured: half of one was not.

        Args:
            conversations: at once.
            speaking: share of a conversation's time in which the model speaks, 0 to 1.
            headroom: room on top, as a share of the load: conversations speak in bursts, and GPUs fail.

        Raises:
            BadRequest: a value is impossible.
        """
        if conversations < 1:
            raise BadRequest(f"conversations must be at least 1 (got {conversations})")
        if not 0 < speaking <= 1:
            raise BadRequest(f"the speaking share must be over 0 and at most 1 (got {speaking:g})")
        if not headroom >= 0:
            raise BadRequest(f"the headroom must be at least 0 (got {headroom:g})")
        speech_per_s = conversations * exact(speaking) * (1 + exact(headroom))
        return self.together * math.ceil(speech_per_s / (self.speech_per_s * self.together))


def exact(value: float) -> Fraction:
    """The decimal number that was written: 0.1 is a tenth."""
    return Fraction(str(value))


def capacity(loads: Sequence[Measured], targets: Targets, gpus: int = 1) -> Capacity:
    """Capacity of one GPU within the targets.

    Args:
        loads: the smallest first.
        targets: what is good enough.
        gpus: of the servers that were measured.

    Raises:
        BadRequest: the smallest load already misses a target; the message says which.
    """
    best: Measured | None = None
    for load in loads:
        if (missed := load.misses(targets)) is None:
            best = load
            continue
        if best is None:
            raise BadRequest(f"no load meets the targets: {load.streams} at once, {missed}")
        return _of(best, gpus, f"{load.streams} at once: {missed}")
    if best is None:
        raise BadRequest("no load was measured")
    return _of(best, gpus, None)


def _of(load: Measured, gpus: int, limit: str | None) -> Capacity:
    return Capacity(
        Fraction(load.streams, gpus),
        load.speech_per_s / gpus,
        load.reply_s,
        limit,
        listens=load.all_listened_s is not None,
        runs=load.runs,
        together=gpus,
    )
