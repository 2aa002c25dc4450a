# SPDX-License-Identifier: Apache-2.0
"""Seconds in which batches of windows were under way, from the launch to the samples, by the kind of window."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Literal, get_args

from triton_omni.core.metrics import SECONDS, Histogram
from triton_omni.token2wav.mel_gather import Due

Kind = Literal["first", "later", "final", "whole"]
_NS_PER_S: Final = 1_000_000_000


def kind_of(due: Due) -> Kind:
    """Return the kind of a window: of a whole reply, or a stream's first, its final one, or another."""
    if not due.is_streamed:
        return "whole"
    if due.chunk.final:
        return "final"
    return "first" if not due.chunk.index else "later"


class WindowTimes:
    """Counts windows and seconds. A batch gets the time since the one before, or since there was work, so that the
    seconds add up to those with work. Its windows share them by their frames.

    Args:
        now_ns: monotonic time, nanoseconds.
    """

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns, self._since_ns = now_ns, 0
        self.of_kind: dict[str, Histogram] = {kind: Histogram(SECONDS) for kind in get_args(Kind)}
        """Seconds of windows."""

    def begin(self) -> None:
        """A batch is launched."""
        self._since_ns = self._since_ns or self._now_ns()

    def rest(self) -> None:
        """No batch is under way any more."""
        self._since_ns = 0

    def end(self, batch: Sequence[Due]) -> None:
        """The oldest batch has finished; others may be under way."""
        before_ns, self._since_ns = self._since_ns, self._now_ns()
        seconds, frames = (self._since_ns - before_ns) / _NS_PER_S, sum(due.frames for due in batch)
        for due in batch:
            self.of_kind[kind_of(due)].observe(seconds * due.frames / frames)
