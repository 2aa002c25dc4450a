# SPDX-License-Identifier: Apache-2.0
"""Who goes first on a device that the stages share: the sound of a listener who has none, then everything else.

Kernels of several processes on one GPU delay each other, and a window of token2wav is thousands of small ones: beside
the steps of thinker and talker it takes three times as long as alone. So token2wav claims the device while somebody
waits for a chunk, the first or the one after what is about to end, and the others hold their next step back; they are
ahead of the sound by far. Pure; the claim travels in the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MANY_SESSIONS: Final = 8
"""Of no more sessions at once each is served as soon as can be; the device has time for all. If there are more, steps
of thinker and talker for which nobody waits keep apart, so that more replies share each."""
LONGEST_CLAIM_NS: Final = 150_000_000
"""After so long the others go on in any case: more than the first windows of 32 listeners take, of which the last tenth
would take as long beside the others as the rest alone."""


@dataclass
class DeviceClaim:
    """Grants at most half of the time: behind a claim, the others have as long as it was."""

    _began_ns: int = 0
    _ended_ns: int = 0
    _free_from_ns: int = 0

    def until_ns(self, wanted: bool, now_ns: int) -> int:
        """Until when the device is claimed, by the monotonic clock in nanoseconds; 0 = it is not."""
        if self._began_ns and (not wanted or now_ns >= self._ended_ns):
            taken = min(now_ns, self._ended_ns) - self._began_ns
            self._began_ns, self._free_from_ns = 0, now_ns + taken
        if wanted and not self._began_ns and now_ns >= self._free_from_ns:
            self._began_ns, self._ended_ns = now_ns, now_ns + LONGEST_CLAIM_NS
        return self._ended_ns if self._began_ns else 0
