# SPDX-License-Identifier: Apache-2.0
"""How many GPUs a load needs and what its speech costs, by a benchmark's report. Pure; all arithmetic is exact.

A closed loop of C streams shows what a server does with C replies always open. The largest measured load that meets the
targets counts, and only if every smaller one does too. A conversation in which the model speaks for a share d of the
time needs d seconds of speech a second; by Little's law it then holds d × real-time factor streams open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from triton_omni_client.errors import BadRequest

from .report import SCHEMA, SCHEMA_VERSION

MINUTES = 1000
"""Minutes of speech that the cost is for."""
_CLOSED = "closed"
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
    """One load of a report, as far as it counts here."""

    streams: int
    first_audio_p95_s: Fraction | None
    """None = too few replies for it."""
    underruns: Fraction
    """Share of replies with one."""
    speech_per_s: Fraction
    """Seconds of speech a second, of all streams."""
    reply_s: Fraction
    """Mean length of a reply's speech, in seconds."""
    failed: int
    replies: int

    def misses(self, targets: Targets) -> str | None:
        """Why this load is too much, or cannot be judged; None = it meets the targets."""
        if self.failed:
            return f"{self.failed} requests failed"
        if self.first_audio_p95_s is None:
            return f"{self.replies} replies, and a p95 needs 20: measure with --requests 20 or more"
        if self.first_audio_p95_s > exact(targets.first_audio_p95_s):
            return f"first audio p95 {float(self.first_audio_p95_s):.3g} s, over {targets.first_audio_p95_s:g} s"
        if self.underruns > exact(targets.underruns):
            silent = float(100 * self.underruns)
            return f"{silent:.3g} % of replies with underruns, over {100 * targets.underruns:g} %"
        return None


@dataclass(frozen=True)
class Capacity:
    """Capacity of one GPU within the targets."""

    streams: Fraction
    speech_per_s: Fraction
    reply_s: Fraction
    limit: str | None
    """Target that the next larger load missed; None = no larger load was measured."""

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
        """GPUs for so many conversations at once.

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
        return math.ceil(conversations * exact(speaking) * (1 + exact(headroom)) / self.speech_per_s)


def exact(value: float) -> Fraction:
    """The decimal number that was written: 0.1 is a tenth."""
    return Fraction(str(value))


def measured_loads(report: Mapping[str, Any]) -> list[Measured]:
    """The closed loops of a report, the smallest first; those that were cut short are left out.

    Raises:
        BadRequest: it is no report of this benchmark, has no such run, is of listeners or crowds, or not of the stream.
    """
    if report.get("schema") != SCHEMA or report.get("schema_version") != SCHEMA_VERSION:
        raise BadRequest(f"this is no report of `triton-omni bench` ({SCHEMA}, version {SCHEMA_VERSION})")
    for asked, option in (("listens", "--listen"), ("crowds", "--crowds")):
        if report.get("workload", {}).get(asked):
            raise BadRequest(f"the report is of {option}, which leaves the server idle: measure without it")
    runs = [run for run in report["runs"] if run["load"]["mode"] == _CLOSED and run["complete"]]
    spoken = [run for run in runs if run["summary"]["audio_seconds_per_s"]]
    if not spoken:
        raise BadRequest("the report has no complete run with speech at a --concurrency")
    if any(run["summary"]["requests_with_underruns"] is None for run in spoken):
        raise BadRequest("the report is of whole replies, which tell nothing of underruns: measure the stream")
    found = [_measured(run) for run in spoken]
    return sorted(found, key=lambda load: load.streams)


def _measured(run: Mapping[str, Any]) -> Measured:
    summary = run["summary"]
    p95 = summary["time_to_first_audio_s"]["p95"]
    return Measured(
        streams=int(run["load"]["value"]),
        first_audio_p95_s=None if p95 is None else exact(p95),
        underruns=Fraction(summary["requests_with_underruns"], summary["completed"]),
        speech_per_s=exact(summary["audio_seconds_per_s"]),
        reply_s=exact(summary["audio_s"]["mean"]),
        failed=sum(summary["errors"].values()),
        replies=int(summary["completed"]),
    )


def capacity(loads: Sequence[Measured], targets: Targets, gpus: int = 1) -> Capacity:
    """Capacity of one GPU within the targets.

    Args:
        loads: the smallest first.
        targets: what is good enough.
        gpus: of the server that was measured.

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
    return Capacity(Fraction(load.streams, gpus), load.speech_per_s / gpus, load.reply_s, limit)
