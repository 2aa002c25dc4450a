# SPDX-License-Identifier: Apache-2.0
"""Keeps lines that repeat out of a log: a caller can make tritonserver write the same one 90,000 times a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

PERIOD_S = 10.0
"""In which a line is written `WRITTEN` times at most."""
WRITTEN = 20
"""More than the frames that the tracebacks of one fault have in common."""
_MOST_LINES = 1024


class Repeats:
    """Lets each line pass `WRITTEN` times in `PERIOD_S`; the others are counted, and told in one line.

    Args:
        clock: seconds, from anywhere.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[float, int]] = {}
        """The beginning of a line's period and how often it came in it, the oldest period first."""

    def pass_on(self, line: str) -> Iterator[str]:
        """Return the text to write for this line, line ends included."""
        now = self._clock()
        yield from self._end_periods(now)
        begin, count = self._seen.get(line, (now, 0))
        if count < WRITTEN:
            yield line
        if count or len(self._seen) < _MOST_LINES:
            self._seen[line] = (begin, count + 1)

    def rest(self) -> Iterator[str]:
        """Return the text to write after the last line."""
        yield from self._end_periods(float("inf"))

    def _end_periods(self, now: float) -> Iterator[str]:
        while self._seen:
            line, (begin, count) = next(iter(self._seen.items()))
            if now - begin < PERIOD_S:
                return
            del self._seen[line]
            if count > WRITTEN:
                yield f"{line.rstrip()} ({count - WRITTEN} times more in {PERIOD_S:.0f} s)\n"
