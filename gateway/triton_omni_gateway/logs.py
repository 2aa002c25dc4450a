# SPDX-License-Identifier: Apache-2.0
"""Log configuration of the gateway: lines on standard error, plain or as JSON, repeated ones counted."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from typing import Any

from pythonjsonlogger.json import JsonFormatter
from uvicorn.config import LOGGING_CONFIG

from .request_log import HTTP, REQUESTS, SOCKETS, Named

EVERY_S = 10.0
"""Between two lines of the same text."""
_MOST_TEXTS = 64
FORMATS = ("plain", "json")


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


def log_config(log_format: str, level: str) -> dict[str, Any]:
    """Return uvicorn's configuration, changed: all lines go to standard error, since standard output has the READY line
    alone, and a request has one line (`request_log`).

    Args:
        log_format: one of `FORMATS`.
        level: lowest level of the requests' lines, which are of the level `info`.
    """
    config = copy.deepcopy(LOGGING_CONFIG)
    del config["loggers"]["uvicorn.access"], config["handlers"]["access"], config["formatters"]["access"]
    config["filters"] = {"named": {"()": Named}, "repeats": {"()": Repeats}}
    config["handlers"]["requests"] = copy.deepcopy(config["handlers"]["default"])
    # Before a line has an id, which would make equal ones differ.
    config["handlers"]["default"]["filters"] = ["repeats", "named"]
    config["loggers"]["asyncio"] = {"handlers": ["default"], "level": "WARNING", "propagate": False}
    # A request's line tells what uvicorn warns of.
    config["loggers"] |= {HTTP: {"level": "ERROR"}, SOCKETS: {"level": "WARNING"}}
    config["loggers"][REQUESTS] = {"handlers": ["requests"], "level": level.upper(), "propagate": False}
    if log_format == "json":
        names = {"levelname": "level", "name": "logger", "exc_info": "exception"}
        config["formatters"]["default"] = {
            "()": JsonFormatter,
            "fmt": ["levelname", "name", "message"],
            "rename_fields": names,
            "timestamp": "time",
        }
    return config
