# SPDX-License-Identifier: Apache-2.0
"""Choice of the due windows that share a batch, and of those that go before a batch that is being launched.

A batch takes a fixed time on the device, however small it is, and a little more for each frame. Many small batches,
each for the most urgent stream, would leave less time for the others. So a batch is filled as far as its most urgent
stream can wait for it. Only a window that cannot wait for another batch goes before it. Uses deadlines and frames only,
independent of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from triton_omni.token2wav.mel_gather import Due

SHORT_BATCH_NS: Final = 100_000_000
"""Nanoseconds of a batch with a single window beside the steps of other stages, with a margin."""
FRAME_NS: Final = 100_000
"""Additional nanoseconds of a batch for each mel frame: 0.2 s if it is full of long windows."""
ENOUGH_NS: Final = 500_000_000
"""Nanoseconds of buffered sound with which a stream can wait for a batch in flight, or for a batch of streams without
sound.
"""


def goes_before(window: Due, launched: Due, now_ns: int) -> bool:
    """Return True if a window cannot wait for a batch whose most urgent one is `launched`."""
    return window.deadline_ns < min(launched.deadline_ns, now_ns + ENOUGH_NS)


def share(due: Sequence[Due], launched: Due | None, now_ns: int, *, most_windows: int, most_frames: int) -> list[Due]:
    """Return the most urgent window and those of the same flow that share its batch.

    If its stream would run out of sound before a full batch finishes, other such windows join. Windows with enough
    sound join as long as the batch finishes in time. None with enough sound joins a batch that goes before one that
    cannot wait for them. A batch of first windows alone may be a third larger: a first window that is left out waits
    for the whole batch.

    Args:
        due: the most urgent first.
        launched: the most urgent of a batch that the new one goes before; None = there is none.
        now_ns: monotonic time, nanoseconds.
        most_windows: maximum number of windows of a batch.
        most_frames: maximum mel frames of a batch; a longer window runs alone.
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
