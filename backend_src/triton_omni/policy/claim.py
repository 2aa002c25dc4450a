# SPDX-License-Identifier: Apache-2.0
"""Claims of a shared GPU: audio for a stream with an empty playback buffer comes first.

Kernels of several processes on one GPU delay each other. A window of token2wav is thousands of small kernels, which
take three times as long beside steps of thinker and talker. So token2wav claims the GPU while a client waits for a
window that is due. The others defer their next step; they are far ahead of the audio.
"""

from __future__ import annotations

from dataclasses import dataclass


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
