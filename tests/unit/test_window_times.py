# SPDX-License-Identifier: Apache-2.0
"""Seconds of token2wav's batches by the kind of their windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from triton_omni.token2wav.batch_launch import WindowTimes

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


def batch(*windows: Window) -> Any:
    return cast(Any, windows)


FIRST, LATER = Window(Chunk(0), 48), Window(Chunk(3), 144)
LAST, WHOLE = Window(Chunk(4, final=True), 24), Window(Chunk(0, final=True), 500, is_streamed=False)


def times_at(moments: list[int]) -> WindowTimes:
    return WindowTimes(lambda: moments.pop(0) * SECOND_NS)


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
