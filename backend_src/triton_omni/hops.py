# SPDX-License-Identifier: Apache-2.0
"""How long messages take from one stage to the next, as a histogram. All stages of a server share one host, so its
monotonic clock is theirs, too. It knows no message and no metric.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Final, Literal

Until = Literal["arrived", "taken"]
"""Where a hop ends: in the next stage's process, or in its loop, which may be in the middle of a step."""

BOUNDS_S: Final = (
    *(1e-4, 2e-4, 3e-4, 5e-4, 7e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 7e-3),
    *(1e-2, 1.5e-2, 2e-2, 3e-2, 5e-2, 0.1, 0.2, 0.5, 1.0),
)
"""Upper bounds of the buckets, seconds; a last one has no bound."""


class HopTimes:
    """A cumulative histogram of seconds; one thread observes, any may read."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def observe(self, sent_ns: int, now_ns: int) -> None:
        """Count one message sent and received at these times of the monotonic clock, in nanoseconds."""
        seconds = max(0, now_ns - sent_ns) / 1e9
        self._counts[bisect.bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    @property
    def count(self) -> int:
        """Messages so far."""
        return sum(self._counts)

    def buckets(self) -> Iterator[tuple[str, int]]:
        """Messages that took at most so many seconds, by bound as Prometheus writes it; the last counts all."""
        count = 0
        for bound, found in zip([*(f"{bound:g}" for bound in BOUNDS_S), "+Inf"], self._counts, strict=True):
            count += found
            yield bound, count
