# SPDX-License-Identifier: Apache-2.0
"""The text of one session on its way through the last stage, which waits for no step of the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from triton_omni.session.answer import Answer
from triton_omni.session.stage import ResponseSender
from triton_omni.session.wire import TalkerMessage


class TextRelay:
    """Answers a session's text as it arrives, on Triton's thread: a step of the loop takes longer than a listener's
    first word. It sends what comes in its order, until it is closed.

    Args:
        lost: told of each text that could not be sent.
    """

    def __init__(self, sender: ResponseSender, lost: Callable[[], object]) -> None:
        self._sender = sender
        self._lost = lost
        self._lock = threading.Lock()
        self._expected = 1
        self._open = True
        self.first_ns = 0
        """Monotonic clock when the first text was answered, nanoseconds; 0 = none was."""

    def take(self, message: TalkerMessage) -> None:
        """Answer the text of the next message, if it has one."""
        with self._lock:
            # What comes out of its order fails the session in the loop.
            self._open = self._open and message.sequence == self._expected
            self._expected += 1
            if self._open and message.text:
                self.first_ns = self.first_ns or time.monotonic_ns()
                self._sender.send(Answer(text=message.text).to_tensors(), lost=self._lost)

    def close(self) -> None:
        """Answer no more; when it returns, nothing is being answered."""
        with self._lock:
            self._open = False
