# SPDX-License-Identifier: Apache-2.0
"""JSON of a server, which may be broken or hostile: whatever is wrong with it is a `ValueError`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from .errors import Internal

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


def as_mapping(value: object, path: str) -> dict[str, Any]:
    """The value as the object that it should be.

    Raises:
        Internal: it is none.
    """
    if not isinstance(value, dict):
        raise Internal(f"{path}: expected an object, found {value!r:.80}")
    return value


def as_list(value: object, path: str) -> list[Any]:
    """The value as the list that it should be.

    Raises:
        Internal: it is none.
    """
    if not isinstance(value, list):
        raise Internal(f"{path}: expected a list, found {value!r:.80}")
    return value


def optional(raw: Mapping[str, Any], name: str, kind: type) -> Any:
    """The value of a key of `info`, None where it is not there.

    Raises:
        Internal: it is of another kind, or a number beyond 64 bits.
    """
    value = raw.get(name)
    accepted = (int, float) if kind is float else kind
    if value is not None and (not isinstance(value, accepted) or isinstance(value, bool) or not is_count(value)):
        raise Internal(f"info: {name} is {value!r:.80}, expected {kind.__name__}")
    return value
