# SPDX-License-Identifier: Apache-2.0
"""How a server comes to its end: it takes nothing new, says that it is not ready, and finishes what it has begun.

Triton alone loses every reply under way: at a stop it closes its HTTP port and refuses requests between stages. So it
is told last. It knows no process and no signal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from triton_omni.session.ledger_table import DRAINING, ENDING, LEAVING, Field

_POLL_S = 0.05
_SETTLED_S = 0.2
"""A session is over when its last response has left its stage; the server then writes it to the client."""


class Sessions(Protocol):
    """State of the open sessions, see `stage_board.py`."""

    def set_word(self, declared: Field, value: int) -> None:
        """Set a field of the server's ledger."""

    def open_sessions(self) -> int:
        """How many are open."""


def drain(
    sessions: Sessions, seconds: float, given_up: Callable[[], bool], tell: Callable[[], None] = lambda: None
) -> bool:
    """Begin no session any more and wait until the last one is over.

    Args:
        seconds: to wait at most.
        given_up: asked now and then; True ends the wait.
        tell: says so to whoever looks; called when it is so, and whoever then asks is refused.

    Returns:
        Whether all are over.
    """
    sessions.set_word(LEAVING, DRAINING)
    tell()
    return _await_none(sessions, seconds, given_up)


def end_sessions(sessions: Sessions, seconds: float, given_up: Callable[[], bool]) -> bool:
    """End those that are open with an error, and wait until it has been told; as `drain` otherwise."""
    sessions.set_word(LEAVING, ENDING)
    return _await_none(sessions, seconds, given_up)


def _await_none(sessions: Sessions, seconds: float, given_up: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    none_since: float | None = None
    while True:
        now = time.monotonic()
        if sessions.open_sessions():
            none_since = None
        elif now - (none_since := none_since or now) >= _SETTLED_S:
            return True
        if given_up() or (now > deadline and none_since is None):
            return False
        time.sleep(_POLL_S)
