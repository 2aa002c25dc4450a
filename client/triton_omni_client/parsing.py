# SPDX-License-Identifier: Apache-2.0
"""JSON of a server, which may be broken or hostile: whatever is wrong with it is a `ValueError`."""

from __future__ import annotations

import json
from typing import Any, Final

_END: Final = 1 << 64
"""Numbers of an account are smaller."""


def parsed(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none, holds a NaN or an infinity by name, or is nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def is_count(value: object) -> bool:
    """True unless it is a number that is infinite or beyond 64 bits, which arithmetic with floats may not hold."""
    return not isinstance(value, int | float) or abs(value) < _END
