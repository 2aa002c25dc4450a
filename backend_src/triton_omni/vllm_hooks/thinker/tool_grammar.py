# SPDX-License-Identifier: Apache-2.0
"""The grammar of a reply that may call functions, in llguidance's dialect of Lark. Pure.

A call is `<tool_call>`, a line of JSON, `</tool_call>`, as Qwen2.5 was trained to write it. Text before the
first one has no such mark. vLLM's structural tags say less: they neither force a call nor bound their number.
"""

from __future__ import annotations

import json
from typing import Final

from triton_omni.session.engine import Function, ToolRules

_MARK: Final = "<tool_call>"
_NEXT: Final = f"\n{_MARK}"
_NAME: Final = '\n{"name": "'
_ARGUMENTS: Final = '", "arguments": '
_END: Final = "}\n</tool_call>"
_SPACED: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space of arguments is as in the calls that the model was trained on."""

_TEXT: Final = r"(.|\n)*"
_LEXEMES: Final = (
    f"TEXT: /{_TEXT}/",
    f"UNMARKED: /{_TEXT}/ & ~/{_TEXT}{_MARK}{_TEXT}/",
    # Lazy: the mark ends it wherever it comes, so no text can pass it.
    f"before[lazy]: /{_TEXT}{_MARK}/",
    f"mark: {json.dumps(_MARK)}",
)


def tool_grammar(rules: ToolRules, json_schema: str | None = None) -> str:
    """The grammar of a reply under these rules.

    Args:
        rules: of the request's tools.
        json_schema: what a reply without calls keeps to; None = any text.
    """
    lines = ["%llguidance {}", f"start: {_start(rules, is_json=json_schema is not None)}", *_LEXEMES]
    if json_schema is not None:
        lines.append(f"json: {_json(json_schema)}")
    if rules.max_calls:
        lines += _calls(rules)
    return "\n".join(lines) + "\n"


def _start(rules: ToolRules, *, is_json: bool) -> str:
    """The forms that a reply may have."""
    if not rules.max_calls:
        return "json" if is_json else "UNMARKED"
    calls = f"call more{{0,{rules.max_calls - 1}}}" if rules.max_calls > 1 else "call"
    if not rules.may_speak:
        return f"mark {calls}"
    return f"json | mark {calls}" if is_json else f"TEXT | before {calls}"


def _calls(rules: ToolRules) -> list[str]:
    functions = [one for one in rules.functions if rules.named in (None, one.name)]
    names = " | ".join(f"tool_{number}" for number in range(len(functions)))
    lines = [f"more: {json.dumps(_NEXT)} call", f"call: {json.dumps(_NAME)} ({names}) {json.dumps(_END)}"]
    for number, one in enumerate(functions):
        lines.append(f"tool_{number}: {json.dumps(one.name + _ARGUMENTS)} {_json(held_schema(one))}")
    return lines


def held_schema(function: Function) -> str:
    """The schema that arguments are held to, with its options for llguidance."""
    options = json.dumps({**_SPACED, "lenient": not function.is_strict})
    return f'{{"x-guidance":{options},{function.schema[1:]}'


def _json(schema: str) -> str:
    """JSON of a schema, in which nothing is left that llguidance takes as a sign of another dialect."""
    return "%json " + schema.replace("::=", r"::\u003d")
