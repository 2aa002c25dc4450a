# SPDX-License-Identifier: Apache-2.0
"""Which JSON schemas a reply may be held to: those whose automaton is about as large as the schema.

A compiler multiplies what must hold at once: the strings of two patterns, the numbers of two divisors, the branches of
two alternatives. A few hundred bytes of those take it minutes and gigabytes, which nothing can interrupt, so they are
refused before. Pure; what a schema may say at all is the compiler's to know.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Final

from triton_omni.errors import BadRequest, TooLarge
from triton_omni.strict_json import key_step, shown

MAX_COUNT: Final = 4096
"""Of items or properties: a compiler writes them out."""
MAX_DIVISOR: Final = 10_000
"""Least common multiple of all `multipleOf`: an automaton has a state for each remainder."""

_COUNTS: Final = frozenset({"minItems", "maxItems", "minProperties", "maxProperties"})
_COMBINED: Final = ("allOf", "anyOf", "oneOf", "$ref")
_BESIDE: Final = frozenset(
    {"$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "examples"}
    | {"readOnly", "title", "type", "writeOnly"}
)
_NAMED: Final = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Keywords whose keys are names."""
_DATA: Final = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are no schemas."""


def check_schema_limits(schema: dict[str, Any], path: str) -> None:
    """Refuse what a compiler would multiply; anywhere, since a `$ref` may lead anywhere.

    Raises:
        BadRequest: several constraints are to hold at once.
        TooLarge: a count or a divisor is over its limit.
    """
    _Walk().schema(schema, path)


class _Walk:
    def __init__(self) -> None:
        self._divisor = 1

    def schema(self, node: object, path: str) -> None:
        if isinstance(node, list):
            for index, value in enumerate(node):
                self.schema(value, f"{path}[{index}]")
        elif isinstance(node, dict):
            self._check(node, path)
            for key, value in node.items():
                if key in _NAMED and isinstance(value, dict):
                    for name, inner in value.items():
                        self.schema(inner, f"{path}.{key}{key_step(name)}")
                elif key not in _DATA:
                    self.schema(value, path + key_step(key))

    def _check(self, node: dict[str, Any], path: str) -> None:
        for key in _COUNTS & node.keys():
            if isinstance(node[key], int | float) and node[key] > MAX_COUNT:
                raise TooLarge(f"{path}.{key}: {shown(node[key])} is over the limit of {MAX_COUNT}")
        self._check_combined(node, path)
        self._check_divisor(node.get("multipleOf"), f"{path}.multipleOf")

    def _check_combined(self, node: dict[str, Any], path: str) -> None:
        combined = [key for key in _COMBINED if key in node]
        if not combined:
            return
        beside = sorted(node.keys() - _BESIDE - {combined[0]})
        if beside:
            raise BadRequest(
                f"{path}: {combined[0]} cannot be combined with {key_step(beside[0])[1:]}: give one of them"
            )
        if isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1:
            raise BadRequest(f"{path}.allOf: {len(node['allOf'])} schemas, at most one can be given")

    def _check_divisor(self, value: object, path: str) -> None:
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            return
        fraction = Fraction(str(value))
        if fraction.numerator > MAX_DIVISOR or fraction.denominator > MAX_DIVISOR:
            raise TooLarge(f"{path}: {shown(value)} is over the limit of {MAX_DIVISOR}")
        self._divisor = math.lcm(self._divisor, fraction.numerator, fraction.denominator)
        if self._divisor > MAX_DIVISOR:
            raise TooLarge(f"{path}: the least common multiple of all is over the limit of {MAX_DIVISOR}")
