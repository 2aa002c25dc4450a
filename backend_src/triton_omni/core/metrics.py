# SPDX-License-Identifier: Apache-2.0
"""Figures that a stage keeps for its operators: numbers, histograms, and seconds of its loop.

They know no metric's kind. Only a figure's owner adds to it; others may read it at any time, and see it at most a
moment old.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

SECONDS: Final = (0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Bounds in seconds of a listener's waits."""
POWERS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Bounds of numbers of sequences."""
LEAKED_AFTER_S: Final = 35.0
"""Seconds after which an ended session counts as leaked: an error waits 30 s at most for a stage in a long step."""


class Metric(NamedTuple):
    """One number at one moment."""

    name: str
    value: float
    labels: Mapping[str, str] = MappingProxyType({})


class Histogram:
    """A cumulative histogram; one thread observes, any may read.

    Args:
        bounds: upper bounds of the buckets, ascending; a last one has no bound.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """Values so far."""
        return sum(self._counts)

    def buckets(self) -> Iterator[tuple[str, int]]:
        """Yield each bound, as Prometheus writes it, and the number of values up to it; the last counts all."""
        bounds = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        return zip(bounds, itertools.accumulate(self._counts), strict=True)

    def metrics(self, name: str, **labels: str) -> Iterator[Metric]:
        """Yield the series of a Prometheus histogram."""
        for bound, count in self.buckets():
            yield Metric(f"{name}_bucket", count, {**labels, "le": bound})
        yield Metric(f"{name}_count", self.count, labels)
        yield Metric(f"{name}_sum", self.total, labels)


class LeakWatch:
    """Counts objects that should be gone and stay; one thread calls `count`."""

    def __init__(self) -> None:
        self._since: dict[Hashable, float] = {}

    def count(self, suspects: Iterable[Hashable], now_s: float | None = None) -> int:
        """Return how many of these were suspects at every call for `LEAKED_AFTER_S`; by the monotonic clock."""
        now = time.monotonic() if now_s is None else now_s
        self._since = {suspect: self._since.get(suspect, now) for suspect in suspects}
        return sum(now - since >= LEAKED_AFTER_S for since in self._since.values())


# --- a loop's seconds -------------------------------------------------------------------------------------------------


Doing = Literal["sessions", "step", "vllm_step", "device", "claim", "pause", "input", "idle"]
"""Work on sessions and messages; a step's work on the host; a whole step of vLLM's own, which has prompts or runs on a
CPU; waiting for the device, for the end of another stage's claim or of a pause, for input of open
sequences, or for sequences.
"""
_NS_PER_S: Final = 1_000_000_000
_of_thread: Final = threading.local()


class LoopClock:
    """Clock of one loop. The thread that has entered it switches it; any thread may read it.

    Args:
        now_ns: monotonic time, nanoseconds.
    """

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns, self._since_ns = now_ns, now_ns()
        self._doing: Doing = "idle"
        self._passed_ns: defaultdict[Doing, int] = defaultdict(int)

    def attach(self) -> None:
        """Make this the clock that `LoopActivity` switches on the calling thread."""
        _of_thread.clock = self

    def switch(self, doing: Doing) -> Doing:
        """Note the loop's activity from now on, and return the one until now."""
        before, now_ns = self._doing, self._now_ns()
        self._passed_ns[before] += now_ns - self._since_ns
        self._doing, self._since_ns = doing, now_ns
        return before

    def metrics(self) -> Iterator[Metric]:
        """Yield the seconds of each thing done so far, without those of the present one."""
        for doing, passed_ns in tuple(self._passed_ns.items()):
            yield Metric("omni_loop_seconds_total", passed_ns / _NS_PER_S, {"doing": doing})


class LoopActivity:
    """Context in which this thread's loop does `what`; without effect on a thread without a clock.

    A class, since a generator would take three times as long as the two switches.
    """

    __slots__ = ("_before", "_clock", "_what")

    def __init__(self, what: Doing) -> None:
        self._what = self._before = what
        self._clock: LoopClock | None = getattr(_of_thread, "clock", None)

    def __enter__(self) -> None:
        if self._clock is not None:
            self._before = self._clock.switch(self._what)

    def __exit__(self, *_: object) -> None:
        if self._clock is not None:
            self._clock.switch(self._before)
