# SPDX-License-Identifier: Apache-2.0
"""Windows that share a batch, windows that go before one that is being launched, and claims of the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from triton_omni.core.policy_settings import Token2WavPolicy
from triton_omni.policy.rules import FRAME_NS, MANY, WINDOW_NS, Snapshot, next_batch, wants_claim

MS = 1_000_000
NOW = 60_000 * MS
POLICY = Token2WavPolicy()
ENOUGH = POLICY.enough_sound_ms * MS


@dataclass(frozen=True)
class Fake:
    name: str
    deadline_ns: int = NOW
    frames: int = 24
    is_streamed: bool = True
    is_first: bool = False
    flow: str = "rk4"


def first(name: str, **told: object) -> Fake:
    return Fake(name, is_first=True, **told)  # type: ignore[arg-type]


def playing(name: str, sound_ms: int, **told: object) -> Fake:
    return Fake(name, NOW + sound_ms * MS, **told)  # type: ignore[arg-type]


def seen(
    due: list[Fake],
    launching: list[Fake] | None = None,
    on_device: list[Fake] | None = None,
    awaited: int = 0,
    streams: int = MANY,
) -> Snapshot[Fake]:
    return Snapshot(NOW, due, launching or [], on_device or [], awaited, streams)


def batch(snapshot: Snapshot[Fake], policy: Token2WavPolicy = POLICY, windows: int = 32, frames: int = 1200) -> str:
    return "".join(w.name for w in next_batch(snapshot, policy, most_windows=windows, most_frames=frames))


def test_without_due_windows_there_is_no_batch() -> None:
    assert batch(seen([])) == ""
    assert batch(seen([], launching=[playing("z", 0)])) == ""


def test_streams_with_an_empty_buffer_share_a_batch() -> None:
    assert batch(seen([playing("a", 0), playing("b", 1), playing("c", 400)])) == "abc"


@pytest.mark.parametrize(("sound_ms", "expected"), [(0, "a"), (100, "a"), (105, "ab"), (108, "abc")])
def test_streams_with_enough_sound_join_while_the_first_is_in_time(sound_ms: int, expected: str) -> None:
    others = [playing(name, 2000) for name in "bcd"]
    # The first window's 24 frames take 2.4 ms besides WINDOW_NS, each further one as long.
    assert batch(seen([playing("a", sound_ms), *others])) == expected


def test_a_batch_is_bounded_in_windows_and_frames() -> None:
    due = [playing(name, 0) for name in "abcdef"]
    assert batch(seen(due), windows=4) == "abcd"
    assert batch(seen(due), frames=72) == "abc"


def test_a_window_longer_than_a_batch_runs_alone() -> None:
    assert batch(seen([playing("a", 0, frames=2000), playing("b", 0)])) == "a"


def test_only_windows_of_one_flow_share_a_batch() -> None:
    assert batch(seen([playing("a", 0), playing("b", 0, flow="euler"), playing("c", 0)])) == "ac"


def test_an_urgent_window_goes_before_a_batch_that_can_wait() -> None:
    assert batch(seen([playing("a", 100)], launching=[playing("z", 2000)])) == "a"
    assert batch(seen([first("a")], launching=[playing("z", 200)])) == "a"


@pytest.mark.parametrize("sound_ms", [POLICY.enough_sound_ms, 3000])
def test_a_window_with_enough_sound_waits_for_the_batch(sound_ms: int) -> None:
    assert batch(seen([playing("a", sound_ms)], launching=[playing("z", 5000)])) == ""


def test_a_window_waits_for_a_more_urgent_batch() -> None:
    assert batch(seen([playing("a", 100)], launching=[playing("z", 50)])) == ""


def test_none_with_enough_sound_joins_a_batch_that_goes_before_an_urgent_one() -> None:
    due = [playing("a", 300), playing("b", 2000)]
    assert batch(seen(due, launching=[playing("z", 400)])) == "a"
    assert batch(seen(due, launching=[playing("z", 4000)])) == "ab"


def test_a_limit_of_zero_switches_the_rule_off() -> None:
    off = Token2WavPolicy(enough_sound_ms=0)
    assert batch(seen([playing("a", 1)], launching=[playing("z", 5000)]), off) == ""


def test_without_a_limit_for_sound_a_silent_stream_still_goes_before() -> None:
    off = Token2WavPolicy(enough_sound_ms=0)
    assert batch(seen([playing("a", -1)], launching=[playing("z", 5000)]), off) == "a"
    assert batch(seen([playing("a", 1), playing("b", 2)]), off) == "a", "none joins a batch that is late"


@pytest.mark.parametrize("sound_ms", [0, 99, 100])
def test_a_stream_with_an_empty_buffer_claims_until_its_window_has_finished(sound_ms: int) -> None:
    window = playing("a", sound_ms)
    assert wants_claim(seen([window]))
    assert wants_claim(seen([], launching=[window]))
    assert wants_claim(seen([], on_device=[window]))


def test_a_stream_with_sound_claims_nothing() -> None:
    window = playing("a", WINDOW_NS // MS + 1)
    assert not wants_claim(seen([window], [window], [window]))


def test_a_whole_reply_claims_nothing() -> None:
    assert not wants_claim(seen([playing("a", 0, is_streamed=False)]))


@pytest.mark.parametrize(("awaited", "wanted"), [(0, True), (1, True), (2, True), (3, False)])
def test_nothing_is_claimed_while_more_streams_lack_their_first_codes(awaited: int, wanted: bool) -> None:
    windows = [playing("a", 0), playing("b", 50), playing("c", WINDOW_NS // MS + 1)]
    assert wants_claim(seen(windows, awaited=awaited)) is wanted
    assert wants_claim(seen([], launching=windows[:1], on_device=windows[1:], awaited=awaited)) is wanted


@pytest.mark.parametrize(
    ("window", "streams", "awaited", "wanted"),
    [
        (playing("a", 0), MANY + 1, 1, False),
        (playing("a", 0), MANY + 1, 0, True),
        (playing("a", 0), MANY, 1, True),
        (first("a"), MANY + 1, 1, True),
    ],
)
def test_among_many_streams_only_first_windows_claim_while_one_lacks_its_first_codes(
    window: Fake, streams: int, awaited: int, wanted: bool
) -> None:
    assert wants_claim(seen([], on_device=[window], awaited=awaited, streams=streams)) is wanted


def test_streams_with_enough_sound_fill_a_batch_of_their_own() -> None:
    due = [playing(name, 2000, frames=168) for name in "abcdefgh"]
    assert batch(seen(due)) == "abcdefg"


def test_a_shorter_window_fits_where_a_longer_one_does_not() -> None:
    due = [playing("a", 2000, frames=168), playing("b", 2000, frames=168), playing("c", 2000)]
    assert batch(seen(due), frames=200) == "ac"


@pytest.mark.parametrize("room", [0, 1, 3, 6])
def test_as_many_windows_join_as_leave_the_batch_in_time(room: int) -> None:
    others = [playing(name, 2000, frames=168) for name in "bcdefgh"]
    sound_ns = WINDOW_NS + (24 + room * 168) * FRAME_NS
    assert batch(seen([Fake("a", NOW + sound_ns), *others])) == "abcdefgh"[: 1 + room]
    assert batch(seen([Fake("a", NOW + sound_ns - 1), *others])) == "abcdefgh"[: max(1, room)]
