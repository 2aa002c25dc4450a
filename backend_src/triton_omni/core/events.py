# SPDX-License-Identifier: Apache-2.0
"""Log records of request events: a name with fields. Never content, media or keys of a request.

A record is one line of text, `finished request=r1 session=s0g1 seconds=1.2`. It also has the event and each field as
an attribute, which the JSON format writes as members of its object (`core/log_format.py`).
"""

from __future__ import annotations

import json
import logging
import re
from typing import Final

Value = str | int | float

LONGEST_VALUE: Final = 128
"""Characters of a value that are told; a client chooses its request's id."""

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
