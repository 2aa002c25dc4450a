# SPDX-License-Identifier: Apache-2.0
"""Which due windows share a batch, and which goes before a batch that is being launched.

A batch takes the device a while however small it is, and a little longer for each frame. Many small ones, each for who
is most urgent at the moment, leave the others less, so a batch is filled as far as its most urgent listener can wait
for it, and only who cannot wait for another has one before it. Knows deadlines and frames, nothing of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from triton_omni.token2wav.mel_gather import Due

SHORT_BATCH_NS: Final = 100_000_000
"""How long a batch of a single window takes beside the steps of other stages, with some to spare."""
FRAME_NS: Final = 100_000
"""And so much longer for each mel frame: 0.2 s if it is full of long windows."""
ENOUGH_NS: Final = 500_000_000
"""A listener with so much sound left can wait for a batch under way, or for one of others who have none."""


def goes_before(window: Due, launched: Due, now_ns: int) -> bool:
    """Whether a window cannot wait for a batch whose most urgent one is `launched`."""
    return window.deadline_ns < min(launched.deadline_ns, now_ns + ENOUGH_NS)


def share(due: Sequence[Due], launched: Due | None, now_ns: int, *, most_windows: int, most_frames: int) -> list[Due]:
    """The most urgent window and those that share its batch, of one flow with it.

    With a listener who would run out of sound before a full batch is through go others who soon will too, and of those
    with enough sound as many as leave the batch in time; none of these before a batch that cannot wait for them. First
    windows alone may be a third more: whom a crowd's batch leaves behind waits for all of it.

    Args:
        due: the most urgent first.
        launched: the most urgent of a batch that the new one goes before; None = there is none.
        now_ns: by the clock of their deadlines.
        most_windows: of a batch.
        most_frames: mel frames of a batch; a longer window is alone.
    """
    if not due:
        return []
    first, batch = due[0], [due[0]]
    frames, only_first = len(first.chunk.solved), first.stream.is_silent
    in_time = min(most_frames, (first.deadline_ns - now_ns - SHORT_BATCH_NS) // FRAME_NS)
    if launched is not None and not _has_enough(launched, now_ns):
        in_time = 0
    for window in due[1:]:
        only_first = only_first and window.stream.is_silent
        most = in_time if _has_enough(window, now_ns) else most_frames * 4 // 3 if only_first else most_frames
        fits = frames + len(window.chunk.solved) <= most and len(batch) < most_windows
        if fits and window.stream.request.flow == first.stream.request.flow:
            batch.append(window)
            frames += len(window.chunk.solved)
    return batch


def _has_enough(window: Due, now_ns: int) -> bool:
    return window.deadline_ns > now_ns + ENOUGH_NS
