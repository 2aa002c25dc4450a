# SPDX-License-Identifier: Apache-2.0
"""Notices that a stage died during a request that no other stage answers."""

from __future__ import annotations

import time
from typing import Final

from triton_omni.core.errors import OmniError
from triton_omni.session.stage import lost_error
from triton_omni.session.stage_board import StageBoard

TOLD_WITHIN_S: Final = 2.0
"""Seconds in which the surviving stages should answer a request that lost a stage."""


class DeathWatch:
    """One request, from now on.

    The process that would answer may have died too, or have ended its own part just before. Every session that was open
    then is lost, so nothing that is asked here is cut off.

    Args:
        board: the server's; None = nothing is known of its stages.
    """

    def __init__(self, board: StageBoard | None) -> None:
        self._board = board
        self._epochs = 0 if board is None else board.epochs()
        self._seen: float | None = None

    def error(self) -> OmniError | None:
        """Return the error that ends the request, if it should have ended by itself; else None."""
        lost = [] if self._board is None else self._board.lost_since(self._epochs)
        if not lost:
            return None
        if self._seen is None:
            self._seen = time.monotonic()
        return lost_error(lost[0]) if time.monotonic() - self._seen > TOLD_WITHIN_S else None
