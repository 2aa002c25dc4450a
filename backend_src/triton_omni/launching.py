# SPDX-License-Identifier: Apache-2.0
"""When a step is being launched, beside which whoever can wait does no work of Python's.

A launch is hundreds of calls of torch, each of which gives Python's global lock up, and beside a busy thread waits for
it each time. On an H200 the first prompt of a crowd, launched within 6 ms alone, took 33 ms while the others were read.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Final

LONGEST_WAIT_S: Final = 0.02
"""A launch that takes longer compiles something, or waits for the device."""


class Launching:
    """Entered by the thread that launches; any other may `wait`."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._over.set()

    def __enter__(self) -> None:
        self._over.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def wait(self) -> None:
        """Return once nothing is being launched, or after a while in any case."""
        self._over.wait(LONGEST_WAIT_S)
