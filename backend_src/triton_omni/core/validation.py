# SPDX-License-Identifier: Apache-2.0
"""Validation messages in this project's words: the only module that knows pydantic's error codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_KINDS: Final = {
    "int": "an integer",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "a string",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
    "model": "a mapping",
    "invalid": "a string as key",
}
"""Expected kinds by the first word of a code: `int_type`, `int_parsing`, `int_from_float` all mean no integer."""
_LIMITS: Final = {
    "greater_than": "be greater than {gt}",
    "greater_than_equal": "be at least {ge}",
    "less_than": "be less than {lt}",
    "less_than_equal": "be at most {le}",
    "literal_error": "be {expected}",
    "too_short": "have {min_length} or more entries",
    "too_long": "have at most {max_length} entries",
    "string_too_short": "have {min_length} or more characters",
    "string_too_long": "have at most {max_length} characters",
}


def wanted_kind(code: str) -> str | None:
    """Name the expected kind of value, such as `an integer`."""
    return _KINDS.get(code.partition("_")[0])


def wanted_limit(code: str, context: Mapping[str, Any]) -> str | None:
    """State the limit that a value of the right kind breaks, such as `be at least 1`."""
    if code not in _LIMITS:
        return None
    return _LIMITS[code].format(**{name: _written(value) for name, value in context.items()})


def _written(value: object) -> str:
    """Write a constant as JSON and YAML do."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).replace("True", "true").replace("False", "false")
