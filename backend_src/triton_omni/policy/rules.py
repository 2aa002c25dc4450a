# SPDX-License-Identifier: Apache-2.0
"""The rules by which three stages share a GPU. All but `Claim` are pure functions of what is there at one moment.

Kernels of several processes on one GPU delay each other. A window of token2wav is thousands of small kernels, which
take three times as long beside steps of thinker and talker.

- *Claim*: token2wav claims the GPU while a client waits for a window that is due. The others defer their next step;
  they are far ahead of the audio.
- *Pause*: the thinker pauses while every pending first window waits only for the later stages. Its steps are not
  needed for a while, since the reply is ahead of its sound from the first window on. A claim would come too late: by
  then two steps of the thinker are in flight.
- *Urgent batch*: a batch takes a fixed time on the GPU, however small it is, and a little more for each frame. Many
  small batches, each for the most urgent stream, would leave less time for the others. So a batch is filled as far as
  its most urgent stream can wait for it. Only a window that cannot wait for another batch goes before it.

The constants below are no settings: they tell what windows of 7B cost on an H100 or H200, and how many streams are
many. An operator tunes a rule by its limit, which is a setting.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from triton_omni.core.policy_settings import NS_PER_MS, Token2WavPolicy

WINDOW_NS: Final = 100_000_000
"""Nanoseconds of a batch with a single window beside the steps of other stages, with a margin."""
FRAME_NS: Final = 100_000
"""Additional nanoseconds of a batch for each mel frame: 0.2 s if it is full of long windows."""
MANY: Final = 24
"""Number of streams above which some have an empty playback buffer all the time."""


class Window(Protocol):
    """A window whose codes have arrived, as the rules see it."""

    @property
    def frames(self) -> int:
        """Mel frames that are solved."""

    @property
    def deadline_ns(self) -> int:
        """Monotonic time when its stream runs out of sound, nanoseconds; the opening for a stream without sound."""

    @property
    def is_streamed(self) -> bool:
        """True if its stream plays while it is made; False for a whole reply."""

    @property
    def is_first(self) -> bool:
        """True if its stream plays while it is made and has no sound yet."""

    @property
    def flow(self) -> Hashable:
        """Solver and its steps: windows of one batch have the same."""


W = TypeVar("W", bound=Window)


@dataclass(frozen=True)
class Snapshot(Generic[W]):
    """The work of token2wav at one moment."""

    now_ns: int
    due: Sequence[W]
    """Windows that are not being launched, the most urgent first."""
    launching: Sequence[W]
    """Windows of the batch that is being launched, the most urgent first."""
    on_device: Sequence[W]
    """Windows of batches that were launched before and have not finished."""
    awaited: int
    """Number of streams whose first codes are missing."""
    streams: int
    """Number of open streams that play while they are made."""


def wants_claim(seen: Snapshot[W]) -> bool:
    """Return True if streams have no sound, or soon none, and wait only for their windows.

    A claim delays the first codes of other streams. So it is not wanted while more streams lack them than wait for a
    window. Among more than `MANY` streams, only first windows count meanwhile.
    """
    pending = [window for window in (*seen.on_device, *seen.launching, *seen.due) if window.is_streamed]
    if seen.awaited and seen.streams > MANY:
        pending = [window for window in pending if window.is_first]
    waiting = sum(window.deadline_ns <= seen.now_ns + WINDOW_NS for window in pending)
    return waiting > 0 and waiting >= seen.awaited


def next_batch(seen: Snapshot[W], policy: Token2WavPolicy, *, most_windows: int, most_frames: int) -> list[W]:
    """Return the windows to launch next; none if all can wait for the batch that is being launched.

    Args:
        seen: windows and streams of this moment.
        policy: the limits.
        most_windows: maximum number of windows of a batch.
        most_frames: maximum mel frames of a batch; a longer window runs alone.
    """
    due = seen.due
    if not due or (seen.launching and not _goes_before(due[0], seen.launching[0], seen.now_ns, policy)):
        return []
    return _share(seen, policy, most_windows=most_windows, most_frames=most_frames)


def _goes_before(window: W, launched: W, now_ns: int, policy: Token2WavPolicy) -> bool:
    """Return True if a window cannot wait for a batch whose most urgent one is `launched`."""
    return window.deadline_ns < min(launched.deadline_ns, now_ns + policy.enough_sound_ms * NS_PER_MS)


def _share(seen: Snapshot[W], policy: Token2WavPolicy, *, most_windows: int, most_frames: int) -> list[W]:
    """Return the most urgent window and those of the same flow that share its batch.

    If its stream would run out of sound before a full batch finishes, other such windows join. Windows with enough
    sound join as long as the batch finishes in time. None with enough sound joins a batch that goes before one that
    cannot wait for them.
    """
    enough_ns = seen.now_ns + policy.enough_sound_ms * NS_PER_MS
    first, batch = seen.due[0], [seen.due[0]]
    frames = first.frames
    in_time = min(most_frames, (first.deadline_ns - seen.now_ns - WINDOW_NS) // FRAME_NS)
    if seen.launching and seen.launching[0].deadline_ns <= enough_ns:
        in_time = 0
    for window in seen.due[1:]:
        most = in_time if window.deadline_ns > enough_ns else most_frames
        if frames + window.frames <= most and len(batch) < most_windows and window.flow == first.flow:
            batch.append(window)
            frames += window.frames
    return batch


# --- claims -----------------------------------------------------------------------------------------------------------


@dataclass
class Claim:
    """Grants at most half of the time: after a claim the other stages have the GPU for as long as it took.

    Args:
        limit_ns: maximum nanoseconds of one claim; 0 = none is granted.
    """

    limit_ns: int
    _began_ns: int = 0
    _ended_ns: int = 0
    _free_from_ns: int = 0

    def until_ns(self, wanted: bool, now_ns: int) -> int:
        """Return the monotonic time in nanoseconds until which the GPU is claimed; 0 = not claimed."""
        if self._began_ns and (not wanted or now_ns >= self._ended_ns):
            taken = min(now_ns, self._ended_ns) - self._began_ns
            self._began_ns, self._free_from_ns = 0, now_ns + taken
        if wanted and self.limit_ns and not self._began_ns and now_ns >= self._free_from_ns:
            self._began_ns, self._ended_ns = now_ns, now_ns + self.limit_ns
        return self._ended_ns if self._began_ns else 0


# --- pauses -----------------------------------------------------------------------------------------------------------


def must_pause(ready_since_ns: Sequence[int], now_ns: int, limit_ns: int) -> bool:
    """Return True if the thinker starts no step now.

    Args:
        ready_since_ns: for each pending first window, the monotonic time in nanoseconds since which no row of it needs
            another step; 0 = some row does.
        now_ns: monotonic time, nanoseconds.
        limit_ns: maximum pause for one window. After it the window, which may wait for a place in the talker's batch,
            causes no pause; 0 = the thinker never pauses.
    """
    counted = [since for since in ready_since_ns if not since or now_ns - since < limit_ns]
    return bool(counted) and all(counted)
