# SPDX-License-Identifier: Apache-2.0
"""Which due windows share a batch, and which goes before a batch that is being launched.

A batch takes the device a while however small it is, and a little longer for each frame. Many small ones, each for who
is most urgent at the moment, leave the others less, so a batch is filled as far as its most urgent listener can wait
for it, and only who cannot wait for another has one before it. Knows deadlines and frames, nothing of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from triton_omni.token2wav.splicing import Due

LONG_BATCH_NS: Final = 200_000_000
"""A batch that is full of long windows takes about as long beside the steps of other stages."""
SHORT_BATCH_NS: Final = 100_000_000
"""So long, with some to spare, a batch of a single window."""
FRAME_NS: Final = 100_000
"""And so much longer for each mel frame."""
ENOUGH_NS: Final = 500_000_000
"""A listener with so much sound left can wait for a batch under way, or for one of others who have none."""


def goes_before(window: Due, launched: Due, now_ns: int) -> bool:
    """Whether a window cannot wait for a batch whose most urgent one is `launched`."""
    return window.deadline_ns < min(launched.deadline_ns, now_ns + ENOUGH_NS)


def share(due: Sequence[Due], now_ns: int, *, most_windows: int, most_frames: int) -> list[Due]:
    """The most urgent window and those that share its batch, of one flow with it.

    With a listener who would run out of sound before a full batch is through go others who soon will too, and of those
    with enough sound as many as leave the batch in time. First windows alone may be a third more: whom a crowd's batch
    leaves behind waits for all of it.

    Args:
        due: the most urgent first.
        now_ns: by the clock of their deadlines.
        most_windows: of a batch.
        most_frames: mel frames of a batch; a longer window is alone.
    """
    if not due:
        return []
    first, batch = due[0], [due[0]]
    frames, in_time = len(first.chunk.solved), _frames_in_time(first, now_ns)
    only_first = first.stream.is_silent
    for window in due[1:]:
        only_first = only_first and window.stream.is_silent
        has_enough = window.deadline_ns > now_ns + ENOUGH_NS
        most = most_frames * 4 // 3 if only_first else most_frames
        if has_enough and in_time is not None:
            most = min(most, in_time)
        fits = frames + len(window.chunk.solved) <= most and len(batch) < most_windows
        if fits and window.stream.request.flow == first.stream.request.flow:
            batch.append(window)
            frames += len(window.chunk.solved)
    return batch


def _frames_in_time(window: Due, now_ns: int) -> int | None:
    """Mel frames of a batch that is through before the window's listener runs out of sound; None = of any batch."""
    left_ns = window.deadline_ns - now_ns
    return None if left_ns > LONG_BATCH_NS else (left_ns - SHORT_BATCH_NS) // FRAME_NS
