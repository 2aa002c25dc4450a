# SPDX-License-Identifier: Apache-2.0
"""Tells who called the thinker: the ensemble, or a client by the stage's own name, which Triton forbids nobody.

A client that names no outputs asks for all that a model has, and so for one that no ensemble asks for: it is refused at
once. One that names the ensemble's is found out by what comes of its session. In an ensemble all that the thinker sends
reaches the talker, which says in the ledger that it has it. Of a client that called the thinker itself the talker hears
nothing: it gets what the talker should have had, and would hold a session.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from triton_omni.errors import BadRequest
from triton_omni.ledger import SessionLedger
from triton_omni.wire import SessionKey

UNHEARD_FOR_S: Final = 20.0
"""So long a talker whose loop turns has nothing of a session. A message takes milliseconds, but those of ten sessions
have waited for more than five seconds before a talker that got a fifth of two slow cores; and a caller of the ensemble
that is turned away leaves its request in Triton."""
_TURNS_S: Final = 1.0
"""A loop that is silent for longer is in a long step and may have what it has not taken up."""

CALLED_BY_NAME: Final = "CALLED_BY_NAME"
"""Output of the thinker that the ensemble leaves out. Triton's ensemble asks for what it maps, and for nothing else."""

logger = logging.getLogger(__name__)


class Caller:
    """What is known of the caller of one session; of the thinker's loop alone."""

    def __init__(self) -> None:
        self._heard = False
        self._since_ns = 0

    def is_stranger(self, ledger: SessionLedger, key: SessionKey, sent: int, now_ns: int) -> bool:
        """Whether a client called the thinker itself.

        Args:
            ledger: of the thinker.
            key: of the session.
            sent: messages of it that have left; the talker gives the first one back when it has the second.
            now_ns: monotonic.
        """
        self._heard = self._heard or bool(ledger.returned(key, "talker") or ledger.consumed(key, "talker"))
        if self._heard:
            return False
        if sent < 2 or ledger.silent_for("talker") > _TURNS_S:
            self._since_ns = 0
            return False
        self._since_ns = self._since_ns or now_ns
        return now_ns - self._since_ns > UNHEARD_FOR_S * 1e9


def check_outputs(requested: Iterable[str]) -> None:
    """Refuse a request for an output that no ensemble asks for.

    Raises:
        BadRequest: its client called the thinker itself.
    """
    if CALLED_BY_NAME in requested:
        raise _turned_away()


def refusal(label: str) -> BadRequest:
    """The answer to such a client, whose request has this name in the log."""
    logger.info("request %s: called the thinker by itself", label)
    return _turned_away()


def _turned_away() -> BadRequest:
    return BadRequest("thinker is a part of the model qwen2_5_omni and answers nobody else: ask that", stage="thinker")
