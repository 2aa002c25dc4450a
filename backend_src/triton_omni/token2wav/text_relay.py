# SPDX-License-Identifier: Apache-2.0
"""Relays the text of one session through the last stage without waiting for an engine step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from triton_omni.session.answer import Answer
from triton_omni.session.stage import ResponseSender
from triton_omni.session.wire import TalkerMessage


class TextRelay:
    """Sends a session's text as it arrives, on Triton's thread, since a step of the loop would delay it. It sends
    messages that arrive in order, until it is closed.

    Args:
        lost: called for each text that could not be sent.
    """

    def __init__(self, sender: ResponseSender, lost: Callable[[], object]) -> None:
        self._sender = sender
        self._lost = lost
        self._lock = threading.Lock()
        self._expected = 1
        self._open = True
        self.first_ns = 0
        """Monotonic time when the first text was sent, nanoseconds; 0 = none was."""

    def forward(self, message: TalkerMessage) -> None:
        """Send the text of the next message, if it has one."""
        with self._lock:
            # A message out of order fails the session in the loop.
            self._open = self._open and message.sequence == self._expected
            self._expected += 1
            if self._open and message.text:
                self.first_ns = self.first_ns or time.monotonic_ns()
                self._sender.send(Answer(text=message.text).to_tensors(), lost=self._lost)

    def close(self) -> None:
        """Stop sending; when this returns, no text is being sent."""
        with self._lock:
            self._open = False
