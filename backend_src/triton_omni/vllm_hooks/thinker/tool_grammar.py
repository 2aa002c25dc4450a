# SPDX-License-Identifier: Apache-2.0
"""The grammar of a reply that may call functions, in llguidance's dialect of Lark. Pure.

A call is `<tool_call>`, a line of JSON, `</tool_call>`, as Qwen2.5 was trained to write it. What stands before the
first one is text without that mark. vLLM's structural tags say less: they neither force a call nor bound their number.
"""

from __future__ import annotations

import json
from typing import Final

from triton_omni.session.engine import ToolRules

_TEXT: Final = r"/(.|\n)*/"
_MARK: Final = "<tool_call>"
_NO_MARK: Final = rf"{_TEXT} & ~/(.|\n)*{_MARK}(.|\n)*/"


def tool_grammar(rules: ToolRules, json_schema: str | None = None) -> str:
    """The grammar of a reply under these rules.

    Args:
        rules: of the request's tools.
        json_schema: what a reply without calls keeps to; None = any text.
    """
    functions = [one for one in rules.functions if rules.named in (None, one[0])]
    lines = ["%llguidance {}", f"start: {' | '.join(_starts(rules, json_schema))}"]
    if rules.may_speak:
        # A lexeme: the mark ends it wherever it comes, so none is skipped.
        lines.append(f"TEXT: {_TEXT if rules.max_calls else _NO_MARK}")
        lines.append(f"open[lazy]: /(.|\\n)*{_MARK}/")
    if json_schema is not None:
        lines.append(f"json: %json {_plain(json_schema)}")
    if rules.max_calls:
        lines.append(f"more: {_quoted(chr(10) + _MARK)} call")
        names = " | ".join(f"tool_{number}" for number in range(len(functions)))
        lines.append(f"call: {_quoted(_NAME_BEGIN)} ({names}) {_quoted(_CALL_END)}")
    for number, (name, schema) in enumerate(functions if rules.max_calls else ()):
        lines.append(f"tool_{number}: {_quoted(name + _ARGUMENTS)} args_{number}")
        lines.append(f"args_{number}: %json {_plain(schema)}")
    return "\n".join(lines) + "\n"


_NAME_BEGIN: Final = '\n{"name": "'
_ARGUMENTS: Final = '", "arguments": '
_CALL_END: Final = "}\n</tool_call>"


def _starts(rules: ToolRules, json_schema: str | None) -> list[str]:
    """The forms that a reply may have."""
    plain = "TEXT" if json_schema is None else "json"
    if not rules.max_calls:
        return [plain]
    rest = f"call more{{0,{rules.max_calls - 1}}}" if rules.max_calls > 1 else "call"
    if not rules.may_speak:
        return [f"{_quoted(_MARK)} {rest}"]
    return [plain, f"open {rest}" if json_schema is None else f"{_quoted(_MARK)} {rest}"]


def _quoted(text: str) -> str:
    return json.dumps(text)


def _plain(schema: str) -> str:
    """The schema, without what llguidance takes as a sign of another dialect."""
    return schema.replace("::=", r"::\u003d")
