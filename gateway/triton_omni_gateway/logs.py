# SPDX-License-Identifier: Apache-2.0
"""Log configuration of the gateway: uvicorn's lines on standard error, repeated ones counted, callers' texts cut."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from typing import Any

from uvicorn.config import LOGGING_CONFIG

EVERY_S = 10.0
"""Between two lines of the same text."""
_MOST_TEXTS = 64
LONGEST_PART = 200
"""Characters of a method or path in the log; a caller may send 32 KiB of it with each request."""


class Repeats(logging.Filter):
    """Lets a line pass once in `EVERY_S`, with the number of those that did not: who makes a server fail can do so
    thousands of times a second.

    Args:
        clock: seconds, from anywhere.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[str, tuple[float, int]] = {}
        """When a text was last written, and how often it was not since."""

    def filter(self, record: logging.LogRecord) -> bool:
        """True if the line is written."""
        text, now = record.getMessage(), self._clock()
        written, dropped = self._seen.get(text, (now - EVERY_S, 0))
        if now - written < EVERY_S:
            self._seen[text] = (written, dropped + 1)
            return False
        self._forget()
        self._seen[text] = (now, 0)
        if dropped:
            record.msg, record.args = f"{text} ({dropped} times more in {now - written:.0f} s)", ()
        return True

    def _forget(self) -> None:
        if len(self._seen) >= _MOST_TEXTS:
            del self._seen[min(self._seen, key=lambda text: self._seen[text][0])]


class ShortParts(logging.Filter):
    """Cuts what a line of the access log has from a caller."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always True: the line is written."""
        if isinstance(record.args, tuple):
            record.args = tuple(part[:LONGEST_PART] if isinstance(part, str) else part for part in record.args)
        return True


def log_config() -> dict[str, Any]:
    """uvicorn's, but with all lines on standard error: standard output has the READY line alone."""
    config = copy.deepcopy(LOGGING_CONFIG)
    config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    config["filters"] = {"repeats": {"()": Repeats}, "short parts": {"()": ShortParts}}
    config["handlers"]["access"]["filters"] = ["short parts"]
    config["handlers"]["default"]["filters"] = ["repeats"]
    config["loggers"]["asyncio"] = {"handlers": ["default"], "level": "WARNING", "propagate": False}
    return config
