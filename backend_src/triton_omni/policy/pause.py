# SPDX-License-Identifier: Apache-2.0
"""The thinker pauses while every pending first window waits only for the later stages.

Steps of the thinker slow down a window of token2wav and the talker's step before it. Those steps are not needed for a
while, since the reply is ahead of its sound from the first window on. token2wav claims the GPU (`policy/claim.py`) once
a window is due, but by then two steps of the thinker are in flight. So the thinker pauses earlier.
"""

from __future__ import annotations

from collections.abc import Sequence


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
