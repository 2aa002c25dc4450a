# SPDX-License-Identifier: Apache-2.0
"""Bounds the JSON schemas that a reply may follow: their automata are about as large as the schemas.

A compiler multiplies constraints that apply at once: the strings of two patterns, the numbers of two divisors, the
branches of two alternatives. A few hundred bytes of those take it minutes and gigabytes, so they are refused before, by
name. Pure; the compiler itself refuses unsupported schemas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Final

from triton_omni.core.errors import BadRequest, TooLarge
from triton_omni.request.strict_json import key_step, shown

MAX_COUNT: Final = 4096
"""Maximum count of items or properties: a compiler writes them out."""
MAX_DIVISOR: Final = 10_000
"""Least common multiple of all `multipleOf`: an automaton has a state for each remainder."""
MAX_PATTERN_PROPERTIES: Final = 64
"""Maximum patterns of a whole schema: a compiler compares each with all others."""
MAX_COUNTED_PROPERTIES: Final = 256
"""Maximum properties of an object with a minimum or maximum number of them: a compiler writes all out for each."""
MAX_DIGITS: Final = 308
"""Maximum digits of an integer: a compiler reads all numbers as doubles."""
LEAST_NUMBER: Final = -(2**63) + 1024
"""Least integer: a compiler negates 64-bit integers, and this is the lowest double whose negative still fits."""

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
_COMPILER_OPTIONS: Final = "x-guidance"
"""Key of the compiler's own options, such as the white space of a reply."""


def check_schema_limits(schema: dict[str, Any], path: str) -> None:
    """Refuse constraints that a compiler would multiply or cannot read, anywhere, since a `$ref` may lead anywhere.

    Raises:
        BadRequest: several constraints are to hold at once, a number cannot be read, or a key is the compiler's own.
        TooLarge: a count or a divisor is over its limit.
    """
    _check_numbers(schema, path)
    checker, nodes = _SchemaChecker(), [(path, schema)]
    while nodes:
        where, node = nodes.pop()
        if isinstance(node, dict):
            checker.check(node, where)
        nodes += reversed(list(subschemas(node, where)))


def subschemas(node: object, path: str) -> Iterator[tuple[str, Any]]:
    """Return the direct children of a schema, or of a list of schemas, that may be schemas or such lists, with their
    paths.
    """
    if isinstance(node, list):
        yield from ((f"{path}[{index}]", value) for index, value in enumerate(node))
    elif isinstance(node, dict):
        for key, value in node.items():
            if key in _NAMED and isinstance(value, dict):
                yield from ((f"{path}{key_step(key)}{key_step(name)}", inner) for name, inner in value.items())
            elif key not in _DATA:
                yield path + key_step(key), value


def _check_numbers(tree: object, path: str) -> None:
    if isinstance(tree, dict):
        for key, value in tree.items():
            _check_numbers(value, path + key_step(key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            _check_numbers(value, f"{path}[{index}]")
    elif isinstance(tree, float) and not math.isfinite(tree):
        raise BadRequest(f"{path}: a number must be finite and below 1e309; larger ones can be given as strings")
    elif isinstance(tree, int):
        if abs(tree) >= 10**MAX_DIGITS:
            digits = len(str(abs(tree)))
            raise BadRequest(
                f"{path}: {digits} digits, the limit is {MAX_DIGITS}; larger numbers can be given as strings"
            )
        if tree < LEAST_NUMBER:
            raise BadRequest(f"{path}: {shown(tree)} is below the limit of {LEAST_NUMBER}; it can be given as a string")


class _SchemaChecker:
    def __init__(self) -> None:
        self._divisor = 1
        self._patterns = 0

    def check(self, node: dict[str, Any], path: str) -> None:
        if _COMPILER_OPTIONS in node:
            raise BadRequest(f"{path}.{_COMPILER_OPTIONS}: unknown key")
        for key in _COUNTS & node.keys():
            if isinstance(node[key], int | float) and node[key] > MAX_COUNT:
                raise TooLarge(f"{path}.{key}: {shown(node[key])} is over the limit of {MAX_COUNT}")
        self._check_properties(node, path)
        self._check_combined(node, path)
        self._check_divisor(node.get("multipleOf"), f"{path}.multipleOf")

    def _check_properties(self, node: dict[str, Any], path: str) -> None:
        named, patterns = (node.get(key) for key in ("properties", "patternProperties"))
        counted = sorted({"minProperties", "maxProperties"} & node.keys())
        if counted and isinstance(named, dict) and len(named) > MAX_COUNTED_PROPERTIES:
            limit = f"the limit is {MAX_COUNTED_PROPERTIES} beside {counted[0]}"
            raise TooLarge(f"{path}.properties: {len(named)} properties, {limit}")
        self._patterns += len(patterns) if isinstance(patterns, dict) else 0
        if self._patterns > MAX_PATTERN_PROPERTIES:
            limit = f"the limit of a whole schema is {MAX_PATTERN_PROPERTIES}"
            raise TooLarge(f"{path}.patternProperties: {self._patterns} patterns up to here, {limit}")

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
