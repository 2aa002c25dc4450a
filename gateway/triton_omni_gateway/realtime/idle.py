# SPDX-License-Identifier: Apache-2.0
"""The timer of a user who says nothing after a reply."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class IdleTimer:
    """Rings once after a reply was heard and nothing came for a while.

    Args:
        ring: called then.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def start(self, playing_seconds: float, idle_seconds: float, silent: Callable[[], None]) -> None:
        """Wait until a reply has been played, then for the user.

        Args:
            playing_seconds: what the client still plays, at most.
            idle_seconds: how long the user may say nothing.
            silent: called when the user's time begins.
        """
        self.stop()
        loop = asyncio.get_running_loop()

        def wait_for_user() -> None:
            silent()
            self._timer = loop.call_later(idle_seconds, self._ring)

        self._timer = loop.call_later(playing_seconds, wait_for_user)

    def stop(self) -> None:
        """Ring no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
