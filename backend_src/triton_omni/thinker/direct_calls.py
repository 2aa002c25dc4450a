# SPDX-License-Identifier: Apache-2.0
"""Tells who called the thinker: the ensemble, or a client by the stage's own name, which Triton forbids nobody.

A client that names no outputs asks for all that a model has, and so for one that no ensemble asks for: it is refused at
once. One that names the ensemble's gets what the talker should have had, and would hold a session. It is found out by
that: the talker says in the ledger which sessions have reached it, and no client can write there. A client that passes
the messages on as the ensemble does reaches it, and has what a client of the ensemble has: one session, until its
deadline at the latest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from triton_omni.core.errors import BadRequest
from triton_omni.session.ledger import SessionLedger
from triton_omni.session.wire import SessionKey

UNHEARD_FOR_S: Final = 20.0
"""So long a talker that runs has had nothing of a session. A message takes milliseconds, but those of ten sessions have
waited for more than five seconds before a talker that got a fifth of two slow cores; and a caller of the ensemble that
is turned away leaves its request in Triton."""
_TURNS_S: Final = 1.0
"""A talker whose loop is silent for longer may stand still as a whole."""

CALLED_BY_NAME: Final = "CALLED_BY_NAME"
"""Output of the thinker that the ensemble leaves out. Triton's ensemble asks for what it maps, and for nothing else."""

logger = logging.getLogger(__name__)


class Caller:
    """What is known of the caller of one session; of the thinker's loop alone."""

    def __init__(self) -> None:
        self._since_ns = 0

    def is_stranger(self, ledger: SessionLedger, key: SessionKey, sent: int, now_ns: int) -> bool:
        """Whether a client called the thinker itself.

        Args:
            ledger: of the thinker.
            key: of the session.
            sent: messages of it that have left.
            now_ns: monotonic.
        """
        if ledger.has_reached(key, "talker"):
            return False
        if not sent or ledger.silent_for("talker") > _TURNS_S:
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
