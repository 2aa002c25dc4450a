# SPDX-License-Identifier: Apache-2.0
"""Signals that tell the supervisor to end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def on_signals(act: Callable[[int], None]) -> Iterator[None]:
    """Have `act` called with the number of each signal that asks for an end: SIGTERM, SIGINT, SIGHUP."""

    def handle(number: int, _frame: FrameType | None) -> None:
        act(number)

    # A hang-up that is ignored (nohup) stays so.
    numbers = [signal.SIGTERM, signal.SIGINT]
    numbers += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    earlier = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def exit_at_once(number: int) -> None:
    """End without tidying up; the exit code as a shell gives it."""
    os._exit(128 + number)
