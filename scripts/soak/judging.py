# SPDX-License-Identifier: Apache-2.0
"""Rules that a run must keep, and its faults, one sentence each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from triton_omni_client import Overloaded

from .asking import LONGEST_S, Ended, Outcome
from .meaning import Meaning, faults_of
from .plan import Fate
from .watching import MIB, Growth, Watched, median

EXPECTED: Mapping[Fate, frozenset[Outcome]] = {
    "whole": frozenset({"finished"}),
    "slow": frozenset({"finished"}),
    "cancelled": frozenset({"cancelled", "finished"}),
    "malformed": frozenset({"refused"}),
    "hurried": frozenset({"timed out", "finished"}),
}
STOP_S = 10.0
_AUDIO_WITHIN = 2.0
"""Times to first audio at the end may be so many times those at the start, and a moment more."""
_AUDIO_MOMENT_S = 0.1
_SHOWN = 20


@dataclass(frozen=True)
class Kill:
    """A stage's process that was killed."""

    stage: str
    killed: float
    back: float
    """Seconds since the run began; a moment after the server said that it is ready."""


@dataclass(frozen=True)
class Soaked:
    """All that is known of a run."""

    requests: int
    ended: Sequence[Ended]
    kills: Sequence[Kill]
    processes: Sequence[Watched]
    left: Mapping[str, float]
    """Contents of the stages once nothing was asked any more."""
    stop_s: float
    seconds: float
    gone: str | None = None
    """Why the server did not go on to the end of the run; None = it did."""
    deaths: int = 0
    """How often a stage's process died, killed or not."""
    overload_expected: bool = False
    """True if more was asked at once than the server takes."""
    exact: bool = True
    """True if equal requests must have got equal replies."""
    growth_allowed: float = 64.0 * MIB
    """Bytes a process."""
    warm_up: float = 0.2
    """Share of a process's samples that are left out of its growth."""
    options: Mapping[str, Any] = field(default_factory=dict)
    meaning: Meaning | None = None
    """The meaning of replies to known questions; None = none was asked."""

    def disturbed(self, ended: Ended) -> bool:
        """True if a stage was missing while this request was open."""
        return any(ended.began <= kill.back and ended.ended >= kill.killed for kill in self.kills)

    def growths(self) -> list[Growth]:
        """Memory growth of each process that lived long enough, without its warm-up and the time of kills."""
        undisturbed = max((kill.back for kill in self.kills), default=0.0)
        found = []
        for process in self.processes:
            first, last = max(undisturbed, process.seconds[0]), process.seconds[-1]
            found.append(Growth.of(process.since(first + self.warm_up * (last - first))))
        return [growth for growth in found if growth is not None]

    def first_audio(self) -> tuple[float, float]:
        """Median times to first audio at the start and at the end, in seconds: of a third of the run each."""
        heard = [ended for ended in self.ended if ended.first_audio_s is not None and not self.disturbed(ended)]
        thirds: list[list[float]] = [[], [], []]
        for ended in heard:
            thirds[min(2, int(3 * ended.began / self.seconds))].append(ended.first_audio_s or 0.0)
        return median(thirds[0]), median(thirds[2])

    def outcomes(self) -> Counter[Outcome]:
        """How many requests ended how."""
        return Counter(ended.outcome for ended in self.ended)


def faults(soaked: Soaked) -> list[str]:
    """Everything that was not as it must be; none is the aim."""
    meant = faults_of(soaked.meaning) if soaked.meaning is not None else ()
    return [*_of_requests(soaked), *_of_replies(soaked), *meant, *_of_the_server(soaked)]


def _of_requests(soaked: Soaked) -> Iterator[str]:
    numbers = Counter(ended.planned.number for ended in soaked.ended)
    if lost := [number for number in range(soaked.requests) if numbers[number] != 1]:
        yield f"{len(lost)} requests did not end exactly once: {lost[:_SHOWN]}"
    if hung := [ended.planned.number for ended in soaked.ended if ended.is_hung]:
        yield f"{len(hung)} requests were not answered within {LONGEST_S:g} s: {hung[:_SHOWN]}"
    wrong = [ended for ended in soaked.ended if not _is_expected(soaked, ended)]
    for ended in wrong[:_SHOWN]:
        yield f"{ended.planned} {ended.outcome} after {ended.ended - ended.began:.2f} s: {ended.error!r}"
    if len(wrong) > _SHOWN:
        yield f"and {len(wrong) - _SHOWN} more requests did not end as they should"


def _is_expected(soaked: Soaked, ended: Ended) -> bool:
    if ended.outcome in EXPECTED[ended.planned.fate]:
        return ended.planned.fate != "malformed" or not isinstance(ended.error, Overloaded) or soaked.overload_expected
    if ended.outcome == "refused" and isinstance(ended.error, Overloaded) and soaked.overload_expected:
        return True
    return soaked.disturbed(ended) and ended.outcome in ("failed", "refused", "timed out")


def _of_replies(soaked: Soaked) -> Iterator[str]:
    first: dict[str, Ended] = {}
    for ended in soaked.ended:
        if ended.reply is not None and ended.told not in (None, ended.reply[1]):
            yield f"request {ended.planned.number} got {ended.reply[1]} of {ended.told} samples that the server sent"
    for ended in soaked.ended if soaked.exact else ():
        if ended.reply is not None and ended.planned.fate != "hurried":
            same = first.setdefault(ended.planned.reply_key, ended)
            if same.reply != ended.reply:
                yield (
                    f"request {ended.planned.number} got another reply than {same.planned.number}, which was the same"
                    f" ({ended.planned.reply_key}): {ended.reply} instead of {same.reply}"
                )


def _of_the_server(soaked: Soaked) -> Iterator[str]:
    if soaked.gone is not None:
        yield f"the server did not live through the run: {soaked.gone}"
    if soaked.deaths > len(soaked.kills):
        yield f"stages died {soaked.deaths} times, {len(soaked.kills)} of them killed by the run"
    if soaked.left:
        yield f"something is left: {dict(soaked.left)}"
    if soaked.stop_s >= STOP_S:
        yield f"the server took {soaked.stop_s:.1f} s to stop"
    for growth in soaked.growths():
        if growth.exceeds(soaked.growth_allowed):
            yield f"{growth.name} grew by {growth.grown / MIB:.0f} MiB in {growth.span_s:.0f} s"
        if growth.files > _SHOWN:
            yield f"{growth.name} has {growth.files} more files open at the end"
    start, end = soaked.first_audio()
    if end > _AUDIO_WITHIN * start + _AUDIO_MOMENT_S:
        yield f"speech began after {1000 * start:.0f} ms at the start and after {1000 * end:.0f} ms at the end"
