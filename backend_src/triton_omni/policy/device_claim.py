# SPDX-License-Identifier: Apache-2.0
"""Priority on a shared device: audio for a stream with an empty playback buffer comes first.

Kernels of several processes on one GPU delay each other. A window of token2wav is thousands of small kernels, which
take three times as long beside steps of thinker and talker. So token2wav claims the device while a client waits for a
chunk that is due. The others defer their next step; they are far ahead of the audio. Pure; the claim travels in the
ledger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MANY_SESSIONS: Final = 8
"""Up to this many sessions, each is served as soon as possible, since the device has time for all. With more, thinker
and talker keep a minimum interval between steps that nobody waits for, so that more replies share each.
"""
LONGEST_CLAIM_NS: Final = 150_000_000
"""Maximum nanoseconds of one claim. It exceeds the first windows of 32 streams; their last tenth gains nothing from a
longer claim.
"""


@dataclass
class DeviceClaim:
    """Grants at most half of the time: after a claim the other stages have the device for as long as it took."""

    _began_ns: int = 0
    _ended_ns: int = 0
    _free_from_ns: int = 0

    def until_ns(self, wanted: bool, now_ns: int) -> int:
        """Return the monotonic time in nanoseconds until which the device is claimed; 0 = not claimed."""
        if self._began_ns and (not wanted or now_ns >= self._ended_ns):
            taken = min(now_ns, self._ended_ns) - self._began_ns
            self._began_ns, self._free_from_ns = 0, now_ns + taken
        if wanted and not self._began_ns and now_ns >= self._free_from_ns:
            self._began_ns, self._ended_ns = now_ns, now_ns + LONGEST_CLAIM_NS
        return self._ended_ns if self._began_ns else 0
