# SPDX-License-Identifier: Apache-2.0
"""Which windows share a batch of token2wav, and which of them has one before a batch that is being launched."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from triton_omni.token2wav.mel_gather import Due
from triton_omni.token2wav.sharing import ENOUGH_NS, FRAME_NS, SHORT_BATCH_NS, goes_before, share

NOW = 10**12
MOST_FRAMES = 1200
LONG, FIRST = 168, 48
"""Mel frames of a window of six new blocks, and of a first one."""


def window(left_ns, frames=LONG, *, silent=False, flow="rk4"):
    """A window whose listener has sound for so long."""
    stream = SimpleNamespace(is_silent=silent, request=SimpleNamespace(flow=flow))
    return Due(stream, SimpleNamespace(solved=range(frames)), NOW + left_ns)


def first_window(waited_ns=1):
    return window(-waited_ns, FIRST, silent=True)


def batch_of(due, launched=None, **limits):
    return share(due, launched, NOW, **{"most_windows": 32, "most_frames": MOST_FRAMES, **limits})


def shared(due, launched=None, **limits):
    """How many of the most urgent first share a batch, none of them left out."""
    batch = batch_of(due, launched, **limits)
    assert batch == due[: len(batch)]
    return len(batch)


ENOUGH = ENOUGH_NS + 1


def test_nothing_is_due():
    assert batch_of([]) == []


def test_those_who_have_enough_sound_fill_a_batch_of_their_own():
    assert shared([window(ENOUGH + at) for at in range(10)]) == MOST_FRAMES // LONG == 7


def test_there_are_no_more_windows_than_may_be():
    assert shared([window(ENOUGH)] * 4, most_windows=3) == 3


def test_a_window_that_is_longer_than_a_batch_may_be_is_alone():
    assert shared([window(ENOUGH, MOST_FRAMES + 1), window(ENOUGH)]) == 1


def test_shorter_windows_go_where_a_longer_one_does_not_fit():
    long, short = window(ENOUGH), window(ENOUGH, 24)
    assert batch_of([long, long, short], most_frames=200) == [long, short]


def test_windows_of_another_flow_wait():
    one, other, like = window(ENOUGH), window(ENOUGH, flow="euler"), window(ENOUGH)
    assert batch_of([one, other, like]) == [one, like]


def test_who_hears_nothing_shares_with_nobody_who_has_enough():
    assert shared([first_window(2), first_window(1), window(ENOUGH)]) == 2


def test_who_hears_nothing_shares_with_those_who_soon_will_not():
    assert shared([first_window(), window(ENOUGH_NS), window(ENOUGH)]) == 2


@pytest.mark.parametrize("room", [0, 1, 3, 6])
def test_as_many_of_those_who_have_enough_come_along_as_leave_a_batch_in_time(room):
    left_ns = SHORT_BATCH_NS + (24 + room * LONG) * FRAME_NS
    assert shared([window(left_ns, 24), *[window(ENOUGH)] * 10]) == 1 + room
    assert shared([window(left_ns - 1, 24), *[window(ENOUGH)] * 10]) == max(1, room)


def test_none_of_those_who_have_enough_goes_before_a_batch_that_cannot_wait_for_them():
    due = [window(ENOUGH_NS - 2), window(ENOUGH_NS), window(ENOUGH)]
    assert shared(due, window(ENOUGH)) == shared(due) == 3
    assert shared(due, window(ENOUGH_NS)) == 2


def test_first_windows_alone_may_be_a_third_more():
    crowd = [first_window() for _ in range(40)]
    assert shared(crowd, most_windows=64) == MOST_FRAMES * 4 // 3 // FIRST == 33
    assert shared([*crowd[:25], window(0, 24)]) == 25
    assert shared([*crowd[:24], window(0, 24)]) == 25


@pytest.mark.parametrize(
    ("left_ns", "launched_ns", "goes"),
    [
        pytest.param(-1, ENOUGH, True, id="silent"),
        pytest.param(ENOUGH_NS - 1, ENOUGH, True, id="soon silent"),
        pytest.param(ENOUGH_NS, ENOUGH, False, id="has enough"),
        pytest.param(-1, -1, False, id="no more urgent"),
        pytest.param(-2, -1, True, id="waits longer"),
    ],
)
def test_only_who_cannot_wait_has_a_batch_before_one_that_is_being_launched(left_ns, launched_ns, goes):
    assert goes_before(window(left_ns), window(launched_ns), NOW) == goes
