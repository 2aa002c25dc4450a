# SPDX-License-Identifier: Apache-2.0
"""Where the time of token2wav's windows goes, by their kind; read from clocks and events, without a wait."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Final, get_args

import torch

from triton_omni.core.metrics import SECONDS, Histogram
from triton_omni.session.engine import WindowKind, WindowPhase
from triton_omni.token2wav.batch_launch import Due, InFlightBatch

_NS_PER_S: Final = 1_000_000_000
_BETWEEN: Final = 64
"""Batches that may go between two solver steps of another; a solver has at most so many steps."""


def kind_of(due: Due) -> WindowKind:
    """Return the kind of a window: of a whole reply, or a stream's first, its final one, or another."""
    if not due.is_streamed:
        return "whole"
    if due.chunk.final:
        return "final"
    return "first" if not due.chunk.index else "later"


class WindowTimes:
    """Counts windows and seconds. A batch gets the device's seconds from its beginning to its end, without those of
    batches that went in between. Its windows share them by their frames. On the CPU a batch gets the time since the one
    before, or since there was work.

    Args:
        now_ns: monotonic time, nanoseconds.
    """

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns, self._since_ns = now_ns, 0
        self._finished: deque[tuple[torch.cuda.Event, float]] = deque(maxlen=_BETWEEN)
        """Beginnings of the last batches that finished, and the seconds until their ends."""
        self.of_kind: dict[WindowKind, Histogram] = {kind: Histogram(SECONDS) for kind in get_args(WindowKind)}
        """Seconds of windows, which add up to those of batches."""
        self.phases: dict[tuple[WindowKind, WindowPhase], float] = dict.fromkeys(
            itertools.product(get_args(WindowKind), get_args(WindowPhase)), 0.0
        )
        """Seconds of all windows of a kind in each phase, which overlap: windows of one batch each count its time."""

    def begin(self) -> None:
        """A batch is launched."""
        self._since_ns = self._since_ns or self._now_ns()

    def rest(self) -> None:
        """No batch is under way any more."""
        self._since_ns = 0

    def end(self, flight: InFlightBatch) -> None:
        """The oldest batch was found finished; others may be under way."""
        before_ns, self._since_ns = self._since_ns, self._now_ns()
        device_s = self._device_s(flight)
        seconds = (self._since_ns - before_ns) / _NS_PER_S if device_s is None else device_s
        turn = max(0.0, (self._since_ns - flight.begun_ns) / _NS_PER_S - seconds)
        for due in flight.batch:
            kind = kind_of(due)
            self.of_kind[kind].observe(seconds * due.frames / flight.frames)
            self.phases[kind, "wait"] += (flight.begun_ns - due.due_since_ns) / _NS_PER_S
            self.phases[kind, "turn"] += turn
            self.phases[kind, "device"] += seconds

    def _device_s(self, flight: InFlightBatch) -> float | None:
        """Return the seconds of a finished batch on the device; None on the CPU."""
        if flight.began is None or flight.copied is None:
            return None
        whole = float(flight.began.elapsed_time(flight.copied)) / 1000
        between = 0.0
        while self._finished and flight.began.elapsed_time(self._finished[-1][0]) > 0:
            between += self._finished.pop()[1]
        self._finished.append((flight.began, whole))
        return whole - between
