# SPDX-License-Identifier: Apache-2.0
"""Every JSON schema comes to a verdict within bounds; one that ends or stops its compiler harms nothing else."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given

from hostile.sizes import cases
from hostile.strategies import COMPILED_SCHEMAS
from triton_omni.core.errors import OmniError
from triton_omni.request.schema_limits import check_schema_limits
from triton_omni.vllm_hooks.thinker import schema_trial
from triton_omni.vllm_hooks.thinker.schema_trial import Verdict, try_schemas

DEEP: dict[str, Any] = {"type": "string"}
for _ in range(15):
    DEEP = {"properties": {"a": DEEP}}

USABLE: dict[str, dict[str, Any]] = {
    "an enum of a thousand": {"enum": [f"value {number}" for number in range(1000)]},
    "a constant of an object": {"const": {"a": [1, {"b": None}], "c": "\U0001f600\x00"}},
    "a large constant": {"const": 10**300},
    "a hundred definitions in a row": {
        "$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(100)} | {"d100": {"type": "integer"}},
        "$ref": "#/$defs/d0",
    },
    "a list of itself": {"items": {"$ref": "#"}, "type": "array"},
    "nesting": DEEP,
    "nested repetition": {"type": "string", "pattern": "((((a{99}){99}){99}){99}){99}"},
    "lengths": {"type": "string", "minLength": 1_000_000, "maxLength": 2_000_000},
    "whole numbers of 64 bits": {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
    "escapes": {"type": "string", "pattern": "^\\u00e9\\x41[\\uD7FF]$"},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an open group": ({"properties": {"a": {"type": "string", "pattern": "("}}}, ".properties.a.pattern"),
    "a hostile property name": ({"patternProperties": {"(a": {}}}, ".patternProperties"),
    "patterns that overlap": ({"patternProperties": {"^a": {}, "b$": {}}}, ".patternProperties"),
    "a tiny number": ({"items": {"type": "number", "minimum": 5e-324}}, ".items.minimum"),
    "a large number": ({"anyOf": [{"type": "number", "minimum": 1e300}]}, ".anyOf[0].minimum"),
    "a length of 63 bits": ({"minLength": 2**62}, ".minLength"),
    "a negative length": ({"$defs": {"a": {"maxLength": -1}}, "$ref": "#/$defs/a"}, ".'$defs'.a.maxLength"),
    "a circle": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        ".'$defs'.a.'$ref'",
    ),
    "choices that overlap": ({"oneOf": [{"type": "string"}, {"pattern": "a"}]}, ".oneOf"),
    "an empty enum": ({"enum": []}, ".enum"),
    "a look ahead": ({"pattern": "(?=a)b"}, ".pattern"),
}
FATAL: dict[str, tuple[dict[str, Any], str, bool]] = {
    "an integer without an opposite": ({"const": -(2**63)}, "it takes more than 1024 KiB of stack", True),
    "a range of such": (
        {"type": "integer", "minimum": -1e19, "maximum": -(2**63)},
        "it takes more than 1024 KiB",
        True,
    ),
    "a count of 32 bits": ({"maxItems": 2**32}, "it takes more than 512 MiB of memory", True),
    "700 patterns": (
        {"patternProperties": {f"^{n}$": {"type": "integer"} for n in range(700)}},
        "it takes more than 2 s of CPU time",
        True,
    ),
}
"""Schemas that `request/schema_limits.py` refuses before; others like them may be found any day."""


@pytest.mark.parametrize("name", USABLE)
def test_what_costs_little_can_be_used(name: str) -> None:
    check_schema_limits(USABLE[name], "s")
    assert try_schemas([json.dumps(USABLE[name])]) == Verdict()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_is_refused_by_its_key(name: str) -> None:
    schema, path = REFUSED[name]
    check_schema_limits(schema, "s")
    verdict = try_schemas([json.dumps(schema)])
    assert verdict.reason
    assert (verdict.path, verdict.is_too_costly) == (path, False)


@pytest.mark.parametrize("name", FATAL)
def test_what_ends_its_compiler_or_takes_too_much_is_a_verdict_as_well(name: str) -> None:
    schema, reason, is_too_costly = FATAL[name]
    with pytest.raises(OmniError):
        check_schema_limits(schema, "s")
    verdict = try_schemas([json.dumps(schema)])
    assert verdict.reason.startswith(reason)
    assert verdict.is_too_costly == is_too_costly


def test_of_schemas_together_the_first_at_fault_is_told() -> None:
    usable, refused = (json.dumps(found) for found in (USABLE["nesting"], REFUSED["a look ahead"][0]))
    fatal = json.dumps(FATAL["an integer without an opposite"][0])
    grammar = json.dumps('start: "a" | b\nb: %json {"const": 1}\n')
    assert try_schemas([usable, usable, grammar]) == Verdict()
    assert try_schemas([usable, refused, fatal])[1:] == (".pattern", False, 1)
    verdict = try_schemas([usable, usable, fatal, refused])
    assert (verdict.is_too_costly, verdict.number) == (True, 2)
    assert try_schemas([usable, json.dumps("start: none\n")])[1:] == ("", False, 1)


@pytest.mark.parametrize("step", [{}, {"type": "object"}, {"items": {}}], ids=str)
def test_references_in_a_long_row_cost_stack_that_a_thread_may_not_have(step: dict[str, Any]) -> None:
    row: dict[str, Any] = {"d400": {"type": "integer"}}
    for number in range(400):
        reference = {"$ref": f"#/$defs/d{number + 1}"}
        row[f"d{number}"] = {"items": reference} if "items" in step else {**step, **reference}
    verdict = try_schemas([json.dumps({"$defs": row, "$ref": "#/$defs/d0"})])
    assert verdict == Verdict("it takes more than 1024 KiB of stack", is_too_costly=True)


def test_a_process_that_cannot_do_its_work_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_trial, "__name__", "triton_omni.no_such_module")
    with pytest.raises(RuntimeError, match=r"No module named triton_omni\.no_such_module"):
        try_schemas(['{"const": "never tried"}'])


@cases(seeded=60, long=10_000)
@given(COMPILED_SCHEMAS)
def test_any_schema_within_the_limits_neither_ends_nor_stops_its_compiler(schema: dict[str, Any]) -> None:
    try:
        check_schema_limits(schema, "s")
    except OmniError:
        return
    verdict = try_schemas([json.dumps(schema)])
    assert not verdict.is_too_costly, verdict
    assert "crashed" not in verdict.reason, verdict


def test_the_process_leaves_no_core_and_ends_at_its_limit() -> None:
    endless = f"import itertools, {schema_trial.__name__} as t; t.why_not = lambda _: list(itertools.count())"
    command = [sys.executable, "-c", f"{endless}; t.CPU_SECONDS = 1; t.main()"]
    ended = subprocess.run(command, input=b"{}", capture_output=True, check=False)
    assert -ended.returncode in (signal.SIGXCPU, signal.SIGKILL) or b"MemoryError" in ended.stderr
