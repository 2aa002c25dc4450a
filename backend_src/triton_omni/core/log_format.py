# SPDX-License-Identifier: Apache-2.0
"""How a stage's log is written: a line a record, plain or as JSON (`OMNI_LOG_FORMAT`)."""

from __future__ import annotations

import logging
import os
import re
import sys
from typing import Final

from pythonjsonlogger.json import JsonFormatter

from triton_omni.core.settings import SettingsError

FORMAT_VARIABLE: Final = "OMNI_LOG_FORMAT"
LEVEL_VARIABLE: Final = "OMNI_LOG_LEVEL"
FORMATS: Final = ("plain", "json")
LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

# Characters that could begin a new line or control a terminal.
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


class PlainFormatter(logging.Formatter):
    """Time, level, logger and message in one line; a traceback follows in lines of its own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        """The line."""
        return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", super().formatMessage(record))


def json_formatter() -> logging.Formatter:
    """Return a formatter that writes an object a line.

    Its members are `level`, `logger`, `message`, `time` (UTC), `event` with its fields, and `exception`.
    """
    names = {"levelname": "level", "name": "logger", "exc_info": "exception"}
    return JsonFormatter(["levelname", "name", "message"], rename_fields=names, timestamp="time")


def configure_logging() -> None:
    """Write this process's records to standard error, as the environment says.

    Raises:
        SettingsError: `OMNI_LOG_FORMAT` is neither `plain` nor `json`, or `OMNI_LOG_LEVEL` no level.
    """
    chosen = os.environ.get(FORMAT_VARIABLE) or "plain"
    if chosen not in FORMATS:
        raise SettingsError(f"{FORMAT_VARIABLE} must be plain or json, not {chosen!r:.80}")
    level = os.environ.get(LEVEL_VARIABLE) or "INFO"
    if level.upper() not in logging.getLevelNamesMapping():
        raise SettingsError(f"{LEVEL_VARIABLE} must be one of {', '.join(LEVELS)}, not {level!r:.80}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(json_formatter() if chosen == "json" else PlainFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if chosen == "json":
        # Else vLLM writes its records itself, in its own form.
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
