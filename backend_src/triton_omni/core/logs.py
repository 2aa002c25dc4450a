# SPDX-License-Identifier: Apache-2.0
"""Log records of request events, failures that last, and the form of a stage's log.

A record has a name and fields, never content, media or keys of a request. It is one line of text,
`finished request=r1 session=s0g1 seconds=1.2`. It also has the event and each field as an attribute, which the JSON
form (`OMNI_LOG_FORMAT`) writes as members of its object.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from typing import Final

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

from triton_omni.core.settings import SettingsError

Value = str | int | float

LONGEST_VALUE: Final = 128
"""Maximum logged characters of a value; a client chooses its request's id."""

_PLAIN: Final = re.compile(r"[\w.:/-]+", re.ASCII)


def log_event(logger: logging.Logger, event: str, **fields: Value | None) -> None:
    """Write one record; fields that are None are left out, long strings are cut.

    Raises:
        KeyError: a field has the name of an attribute that every log record has, such as `name`.
    """
    if logger.isEnabledFor(logging.INFO):
        told = {name: _cut(value) for name, value in fields.items() if value is not None}
        text = " ".join([event, *(f"{name}={_quoted(value)}" for name, value in told.items())])
        logger.info("%s", text, extra={"event": event, **told})


def _cut(value: Value) -> Value:
    if isinstance(value, float):
        return round(value, 4)
    return value[:LONGEST_VALUE] if isinstance(value, str) else value


def _quoted(value: Value) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(value)


class LastingFailure:
    """A failure of work that is tried again and again, so that it is reported once a cause; for one thread."""

    def __init__(self) -> None:
        self._cause: str | None = None

    def begins(self, cause: str) -> bool:
        """Note that the work failed; return True unless it failed the last time too, for the same cause."""
        before, self._cause = self._cause, cause
        return before != cause

    def ends(self) -> bool:
        """Note that the work succeeded; return True if it failed the last time."""
        before, self._cause = self._cause, None
        return before is not None


# --- the format of a log ----------------------------------------------------------------------------------------------


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
    # vLLM adds this attribute to every record of its process.
    reserved = [*RESERVED_ATTRS, "vllm_process_name"]
    return JsonFormatter(
        ["levelname", "name", "message"], rename_fields=names, timestamp="time", reserved_attrs=reserved
    )


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
        # Otherwise vLLM writes its records itself, in its own form.
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
