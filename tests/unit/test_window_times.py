# SPDX-License-Identifier: Apache-2.0
"""Seconds of token2wav's batches by the kind of their windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from triton_omni.token2wav.batch_launch import InFlightBatch
from triton_omni.token2wav.window_times import WindowTimes

SECOND_NS = 1_000_000_000


@dataclass
class Chunk:
    index: int
    final: bool = False


@dataclass
class Window:
    chunk: Chunk
    frames: int
    is_streamed: bool = True
    due_since_ns: int = 0


@dataclass
class Event:
    """A point that the device reached, in milliseconds."""

    at_ms: float

    def elapsed_time(self, later: Event) -> float:
        return later.at_ms - self.at_ms


def batch(*windows: Any, begun: int = 0, began_ms: float | None = None, copied_ms: float = 0) -> InFlightBatch:
    began = None if began_ms is None else cast(torch.cuda.Event, Event(began_ms))
    copied = None if began is None else cast(torch.cuda.Event, Event(copied_ms))
    return InFlightBatch(windows, begun * SECOND_NS, began, (), torch.empty(0), None, copied)


FIRST, LATER = Window(Chunk(0), 48), Window(Chunk(3), 144)
LAST, WHOLE = Window(Chunk(4, final=True), 24), Window(Chunk(0, final=True), 500, is_streamed=False)


def times_at(moments: list[int]) -> WindowTimes:
    return WindowTimes(lambda: moments.pop(0) * SECOND_NS)


def phases(times: WindowTimes) -> dict[str, float]:
    return {"/".join(key): seconds for key, seconds in times.phases.items() if seconds}


def found(times: WindowTimes) -> dict[str, tuple[int, float]]:
    return {kind: (seconds.count, seconds.total) for kind, seconds in times.of_kind.items() if seconds.count}


def test_windows_share_the_seconds_of_their_batch_by_frames() -> None:
    times = times_at([10, 14])
    times.begin()
    times.end(batch(FIRST, LATER))
    assert found(times) == {"first": (1, 1.0), "later": (1, 3.0)}


def test_a_batch_counts_from_the_end_of_the_one_before() -> None:
    times = times_at([10, 11, 15])
    times.begin()
    times.begin()
    times.end(batch(FIRST))
    times.end(batch(WHOLE))
    assert found(times) == {"first": (1, 1.0), "whole": (1, 4.0)}


def test_rest_counts_for_nobody() -> None:
    times = times_at([10, 11, 100, 102])
    times.begin()
    times.end(batch(FIRST))
    times.rest()
    times.begin()
    times.end(batch(LAST))
    assert found(times) == {"first": (1, 1.0), "final": (1, 2.0)}


def test_a_window_waits_for_its_launch_then_for_its_turn() -> None:
    times, due = times_at([10, 25]), Window(Chunk(0), 48, due_since_ns=7 * SECOND_NS)
    times.begin()
    times.end(batch(due, begun=10, began_ms=2000, copied_ms=12_000))
    assert phases(times) == pytest.approx({"first/wait": 3, "first/turn": 5, "first/device": 10})
    assert found(times) == {"first": (1, 10.0)}


def test_the_device_counts_for_one_batch_at_a_time() -> None:
    times = times_at([10, 14, 16])
    times.begin()
    times.end(batch(FIRST, FIRST, begun=12, began_ms=2000, copied_ms=3000))
    # Begun earlier: the other batch went before it.
    times.end(batch(WHOLE, begun=10, began_ms=0, copied_ms=5500))
    assert found(times) == {"first": (2, 1.0), "whole": (1, 4.5)}
    assert phases(times) == pytest.approx(
        {"first/wait": 24, "first/turn": 2, "first/device": 2, "whole/wait": 10, "whole/turn": 1.5, "whole/device": 4.5}
    )


def test_batches_between_two_steps_of_another_are_counted_once() -> None:
    times = times_at([10, 14, 16, 18, 20])
    times.begin()
    for began_ms, copied_ms in [(2000, 3000), (4000, 4500)]:
        times.end(batch(FIRST, began_ms=began_ms, copied_ms=copied_ms))
    times.end(batch(WHOLE, began_ms=1000, copied_ms=6000))
    times.end(batch(LATER, began_ms=6000, copied_ms=8000))
    assert found(times) == {"first": (2, 1.5), "whole": (1, 3.5), "later": (1, 2.0)}


def test_a_batch_after_a_rest_of_the_device_counts_from_its_own_beginning() -> None:
    times = times_at([10, 11, 21])
    times.begin()
    times.end(batch(FIRST, begun=10, began_ms=0, copied_ms=1000))
    times.end(batch(LATER, begun=20, began_ms=10_000, copied_ms=10_500))
    assert found(times) == {"first": (1, 1.0), "later": (1, 0.5)}
