# SPDX-License-Identifier: Apache-2.0
"""The clock of a stage's loop: each moment belongs to one thing that it does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch

from triton_omni.core import metrics
from triton_omni.core.metrics import LoopActivity, LoopClock
from triton_omni.session.loop import StageLoop

SECOND_NS = 1_000_000_000


class Time:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def clock(time: Time) -> Iterator[LoopClock]:
    clock = LoopClock(time)
    clock.attach()
    yield clock
    del metrics._of_thread.clock


def seconds(clock: LoopClock) -> dict[str, float]:
    return {metric.labels["doing"]: metric.value for metric in clock.metrics()}


def test_each_moment_counts_for_what_was_done(clock: LoopClock, time: Time) -> None:
    for at, what in ((1, "sessions"), (3, "step"), (6, "claim"), (10, "sessions")):
        time.now_ns = at * SECOND_NS
        clock.switch(what)  # type: ignore[arg-type]
    assert seconds(clock) == {"idle": 1, "sessions": 2, "step": 3, "claim": 4}


def test_a_part_of_a_step_counts_for_itself_also_where_it_fails(clock: LoopClock, time: Time) -> None:
    clock.switch("step")
    with contextlib.suppress(RuntimeError), LoopActivity("device"):
        time.now_ns = 2 * SECOND_NS
        raise RuntimeError
    time.now_ns = 5 * SECOND_NS
    clock.switch("idle")
    assert seconds(clock) == {"idle": 0, "device": 2, "step": 3}


def test_other_threads_switch_no_clock(clock: LoopClock, time: Time) -> None:
    def elsewhere() -> None:
        with LoopActivity("device"):
            time.now_ns = SECOND_NS

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    clock.switch("step")
    assert seconds(clock) == {"idle": 1}


class Driven:
    """Has work once, which is a wait for the device; then it is held."""

    def __init__(self, time: Time) -> None:
        self._time, self.loop, self.rested = time, None, threading.Event()
        self._worked = False

    def has_work(self) -> bool:
        return not self._worked

    def step(self) -> None:
        self._time.now_ns += SECOND_NS
        with LoopActivity("device"):
            self._time.now_ns += 2 * SECOND_NS
        self._worked = True

    def poll(self) -> float:
        self._time.now_ns += 4 * SECOND_NS
        if self._worked:
            # The second time it has waited once.
            if self.loop.waits_for == "claim":  # type: ignore[attr-defined]
                self.rested.set()
            self.loop.waits_for = "claim"  # type: ignore[attr-defined]
        return 0.001

    def fail(self, error: Exception) -> None:
        raise error


def test_a_loop_tells_sessions_steps_and_waits_apart(time: Time) -> None:
    driven = Driven(time)
    loop = StageLoop("test-loop", driven, torch.device("cpu"))
    loop.clock = LoopClock(time)
    driven.loop = loop  # type: ignore[assignment]
    loop.start()
    assert driven.rested.wait(30)
    assert loop.stop()
    found = seconds(loop.clock)
    assert (found["step"], found["device"]) == (1, 2)
    assert found["sessions"] >= 4
    assert "claim" in found
