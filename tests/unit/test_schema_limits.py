# SPDX-License-Identifier: Apache-2.0
"""Schemas that take a compiler far more than their size are refused by name; ordinary ones are not."""

import pytest

from triton_omni.core.errors import BadRequest, OmniError, TooLarge
from triton_omni.request.schema_limits import (
    LEAST_NUMBER,
    MAX_COUNT,
    MAX_COUNTED_PROPERTIES,
    MAX_DIVISOR,
    MAX_PATTERN_PROPERTIES,
    check_schema_limits,
)

ORDINARY = [
    {},
    {"type": "object", "properties": {"allOf": {"type": "string"}, "$ref": {"anyOf": [{"const": 1}, {"const": 2}]}}},
    {"$defs": {"a": {"type": "string", "pattern": "a+"}}, "$ref": "#/$defs/a", "title": "A", "description": "of a"},
    {"properties": {"a": {"allOf": [{"$ref": "#/$defs/a"}], "default": {"allOf": [1, 2]}}}, "$defs": {"a": {}}},
    {"anyOf": [{"type": "array", "items": {"multipleOf": 0.01}, "maxItems": MAX_COUNT}, {"type": "null"}]},
    {"type": "integer", "multipleOf": MAX_DIVISOR},
    {"type": "number", "multipleOf": 1 / MAX_DIVISOR},
    {"enum": [{"anyOf": 1, "oneOf": 2}], "const": {"multipleOf": 10**9}},
    {"enum": [10**307, LEAST_NUMBER, True, None], "const": {"x-guidance": 1}},
    {"patternProperties": {f"^{n}$": {} for n in range(MAX_PATTERN_PROPERTIES)}},
    {"properties": {f"p{n}": {} for n in range(MAX_COUNTED_PROPERTIES)}, "minProperties": 1},
    {"properties": {f"p{n}": {} for n in range(MAX_COUNTED_PROPERTIES + 1)}},
]
PATTERNS = [{"type": "string", "pattern": f".*{chr(97 + n)}.{{{n}}}b.*"} for n in range(16)]


@pytest.mark.parametrize("schema", ORDINARY, ids=str)
def test_ordinary_schemas_pass(schema):
    check_schema_limits(schema, "s")


@pytest.mark.parametrize(
    "schema",
    [{"multipleOf": value} for value in (True, "2", None, 0, -1, -0.5)]
    + [{"maxItems": "5000"}, {"minItems": None}, {"allOf": 5}, {"properties": 5}],
    ids=str,
)
def test_what_is_no_schema_is_left_to_the_compiler(schema):
    check_schema_limits(schema, "s")


def test_what_is_no_divisor_hides_none():
    with pytest.raises(TooLarge, match=r"s\.items\[2\]\.multipleOf: the least common"):
        check_schema_limits({"items": [{"multipleOf": 997}, {"multipleOf": 0}, {"multipleOf": 991}]}, "s")


@pytest.mark.parametrize(
    ("schema", "kind", "said"),
    [
        ({"type": "integer", "multipleOf": 9999991}, TooLarge, "s.multipleOf: 9999991 is over the limit of 10000"),
        ({"multipleOf": 1e-9}, TooLarge, "s.multipleOf: 1e-09 is over"),
        ({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}, BadRequest, "s.allOf: 2 schemas, at most one"),
        ({"items": [{"multipleOf": 997}, {"multipleOf": 991}]}, TooLarge, "s.items[1].multipleOf: the least common"),
        ({"allOf": PATTERNS}, BadRequest, "s.allOf: 16 schemas"),
        ({"pattern": "a", "anyOf": [{"pattern": "b"}]}, BadRequest, "s: anyOf cannot be combined with pattern"),
        ({"$defs": {"a": {"pattern": "a", "$ref": "#/$defs/b"}}}, BadRequest, "s.'$defs'.a: $ref cannot be combined"),
        ({"anyOf": [{}], "oneOf": [{}]}, BadRequest, "s: anyOf cannot be combined with oneOf"),
        ({"properties": {"a": {"maxItems": MAX_COUNT + 1}}}, TooLarge, "s.properties.a.maxItems: 4097 is over"),
        (
            {"items": {"const": -(2**63)}},
            BadRequest,
            "s.items.const: -9223372036854775808 is below the limit of -92233",
        ),
        ({"enum": [1, [LEAST_NUMBER - 1]]}, BadRequest, "s.enum[1][0]: -9223372036854774785 is below"),
        ({"minimum": -(2**64), "maximum": -(2**63)}, BadRequest, "s.minimum: -18446744073709551616 is below"),
        ({"default": {"a": 10**308}}, BadRequest, "s.default.a: 309 digits, the limit is 308"),
        ({"anyOf": [{"minimum": float("-inf")}]}, BadRequest, "s.anyOf[0].minimum: a number must be finite"),
        ({"x-guidance": {"whitespace_pattern": ".*"}}, BadRequest, "s.x-guidance: unknown key"),
        (
            {"items": {"properties": {f"p{n}": {} for n in range(257)}, "maxProperties": 1}},
            TooLarge,
            "s.items.properties: 257 properties, the limit is 256 beside maxProperties",
        ),
        (
            {"anyOf": [{"patternProperties": {f"^{n}{m}": {} for m in range(33)}} for n in "ab"]},
            TooLarge,
            "s.anyOf[1].patternProperties: 66 patterns up to here, the limit of a whole schema is 64",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_a_compiler_multiplies_is_refused_by_name(schema, kind, said):
    with pytest.raises(OmniError) as refusal:
        check_schema_limits(schema, "s")
    assert type(refusal.value) is kind
    assert said in str(refusal.value)
