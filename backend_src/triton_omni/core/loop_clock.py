# SPDX-License-Identifier: Apache-2.0
"""Seconds of a stage's loop by what it does. It does one thing at a time, so the seconds add up to those passed."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Final, Literal

from triton_omni.core.metrics import Metric

Doing = Literal["sessions", "step", "vllm_step", "device", "claim", "pause", "gather", "input", "idle"]
"""Work on sessions and messages; a step's work on the host; a whole step of vLLM's own, which has prompts or runs on a
CPU; waiting for the device, for the end of another stage's claim, of a pause or of a gathering, for input of open
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
        """Make this the clock that `SpentOn` switches on the calling thread."""
        _of_thread.clock = self

    def switch(self, doing: Doing) -> Doing:
        """The loop does this from now on; returns what it did until now."""
        before, now_ns = self._doing, self._now_ns()
        self._passed_ns[before] += now_ns - self._since_ns
        self._doing, self._since_ns = doing, now_ns
        return before

    def metrics(self) -> Iterator[Metric]:
        """Yield the seconds of each thing done so far, without those of the present one."""
        for doing, passed_ns in tuple(self._passed_ns.items()):
            yield Metric("omni_loop_seconds_total", passed_ns / _NS_PER_S, {"doing": doing})


class SpentOn:
    """Within, the loop of this thread does `what`; nothing happens on a thread without a clock.

    No generator, which would take three times as long as the two switches.
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
