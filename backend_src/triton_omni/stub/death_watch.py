# SPDX-License-Identifier: Apache-2.0
"""Notices that a stage died behind a request for which no other stage has told it."""

from __future__ import annotations

import time
from typing import Final

from triton_omni.core.errors import OmniError
from triton_omni.session.stage import lost_error
from triton_omni.session.stage_board import StageBoard

TOLD_WITHIN_S: Final = 2.0
"""What the stages that are left get to answer a request that lost one."""


class DeathWatch:
    """One request, from now on.

    Who would answer it may have died with the stage, or have ended its own part just before. Every session that was
    open then is lost, so nothing that is asked here is cut off.

    Args:
        board: the server's; None = nothing is known of its stages.
    """

    def __init__(self, board: StageBoard | None) -> None:
        self._board = board
        self._epochs = 0 if board is None else board.epochs()
        self._seen: float | None = None

    def error(self) -> OmniError | None:
        """What the request is to end with, if it should have ended by itself."""
        lost = [] if self._board is None else self._board.lost_since(self._epochs)
        if not lost:
            return None
        if self._seen is None:
            self._seen = time.monotonic()
        return lost_error(lost[0]) if time.monotonic() - self._seen > TOLD_WITHIN_S else None
