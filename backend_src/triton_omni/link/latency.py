# SPDX-License-Identifier: Apache-2.0
"""How long rows and codes take from one stage to the next, as a histogram. All stages of a server share one host, so
its monotonic clock is theirs, too. It knows no message, no ring and no metric.
"""

from __future__ import annotations

from typing import Final, Literal

from triton_omni.core.metrics import Histogram

Until = Literal["arrived", "taken"]
"""Where a hop ends: in the next stage's process, or in its loop, which may be in the middle of a step."""

BOUNDS_S: Final = (
    *(1e-4, 2e-4, 3e-4, 5e-4, 7e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 7e-3),
    *(1e-2, 1.5e-2, 2e-2, 3e-2, 5e-2, 0.1, 0.2, 0.5, 1.0),
)
"""Upper bounds of the buckets, seconds; a last one has no bound."""


class LinkLatency(Histogram):
    """A histogram of seconds."""

    def __init__(self) -> None:
        super().__init__(BOUNDS_S)

    def measure(self, sent_ns: int, now_ns: int) -> None:
        """Count what was sent and received at these times of the monotonic clock, in nanoseconds."""
        self.observe(max(0, now_ns - sent_ns) / 1e9)
