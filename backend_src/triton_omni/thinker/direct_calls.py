# SPDX-License-Identifier: Apache-2.0
"""Detects clients that call the thinker model directly instead of through the ensemble; Triton does not forbid it.

A client that names no outputs asks for all of them, thus also for `CALLED_BY_NAME`, which the ensemble never requests:
it is refused at once. A client that names the ensemble's outputs receives what the talker should receive, and would
hold a session. The thinker detects it by the ledger: the talker marks there the sessions that have reached it, and
clients cannot write there. A client that forwards the messages to the talker gains nothing. Like a client of the
ensemble, it has one session, until its deadline at the latest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from triton_omni.core.errors import BadRequest
from triton_omni.session.ledger import SessionLedger
from triton_omni.session.ledger_table import REACHED
from triton_omni.session.wire import SessionKey

UNHEARD_FOR_S: Final = 20.0
"""Seconds without any message of a session at a running talker, after which its client is refused as a direct caller. A
message normally takes milliseconds. With ten sessions and a talker limited to a fifth of two slow cores, messages
waited for more than five seconds. To refuse a caller of the ensemble by mistake would leak its request in Triton.
"""
_TURNS_S: Final = 1.0
"""Seconds of silence of the talker's loop after which the talker may hang, so that nothing is concluded."""

CALLED_BY_NAME: Final = "CALLED_BY_NAME"
"""Output of the thinker that the ensemble does not map. Triton's ensemble requests only the outputs that it maps.
"""

logger = logging.getLogger(__name__)


class Caller:
    """Decides if the client of one session called the thinker directly; used by the thinker's loop only."""

    def __init__(self) -> None:
        self._since_ns = 0

    def is_direct(self, ledger: SessionLedger, key: SessionKey, sent: int, now_ns: int) -> bool:
        """Return True if a client called the thinker directly.

        Args:
            ledger: the thinker's.
            key: of the session.
            sent: number of the session's messages that were sent.
            now_ns: monotonic time, nanoseconds.
        """
        if ledger.has(key, REACHED, "talker"):
            return False
        if not sent or ledger.silent_for("talker") > _TURNS_S:
            self._since_ns = 0
            return False
        self._since_ns = self._since_ns or now_ns
        return now_ns - self._since_ns > UNHEARD_FOR_S * 1e9


def check_outputs(requested: Iterable[str]) -> None:
    """Refuse a request for `CALLED_BY_NAME`, which the ensemble never requests.

    Raises:
        BadRequest: its client called the thinker directly.
    """
    if CALLED_BY_NAME in requested:
        raise _turned_away()


def refusal(label: str) -> BadRequest:
    """Log a direct call under the request's label, and return the error that answers it."""
    logger.info("request %s: the client called the thinker directly", label)
    return _turned_away()


def _turned_away() -> BadRequest:
    return BadRequest(
        "thinker is a stage of the model qwen2_5_omni and cannot be called directly: call qwen2_5_omni", stage="thinker"
    )
