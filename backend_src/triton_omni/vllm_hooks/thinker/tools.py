# SPDX-License-Identifier: Apache-2.0
"""Calls of functions in a reply: the grammar that constrains them, and the reader that finds them in the growing text.

A call is `<tool_call>`, a line of JSON, `</tool_call>`, as Qwen2.5 was trained to write it. Text before the first one
has no such mark. The grammar is in llguidance's dialect of Lark, since vLLM's structural tags can neither
force a call nor bound the number of calls. vLLM's parser of the Hermes format reads the calls.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from triton_omni.session.engine import CallPiece, Function, ToolRules
from triton_omni.vllm_hooks.shared.compat import Hermes2ProToolParser

_MARK: Final = "<tool_call>"
_NEXT: Final = f"\n{_MARK}"
_NAME: Final = '\n{"name": "'
_ARGUMENTS: Final = '", "arguments": '
_END: Final = "}\n</tool_call>"
_SPACED: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space of arguments, as in the calls of the model's training."""

_TEXT: Final = r"(.|\n)*"
_LEXEMES: Final = (
    f"TEXT: /{_TEXT}/",
    f"UNMARKED: /{_TEXT}/ & ~/{_TEXT}{_MARK}{_TEXT}/",
    # Lazy: it ends at the first mark, so no text can contain one.
    f"before[lazy]: /{_TEXT}{_MARK}/",
    f"mark: {json.dumps(_MARK)}",
)


def tool_grammar(rules: ToolRules, json_schema: str | None = None) -> str:
    """Return the grammar of a reply under these rules.

    Args:
        rules: of the request's tools.
        json_schema: schema of a reply without calls; None = any text.
    """
    lines = ["%llguidance {}", f"start: {_start(rules, is_json=json_schema is not None)}", *_LEXEMES]
    if json_schema is not None:
        lines.append(f"json: {_json(json_schema)}")
    if rules.max_calls:
        lines += _calls(rules)
    return "\n".join(lines) + "\n"


def _start(rules: ToolRules, *, is_json: bool) -> str:
    """Return the alternatives for a reply."""
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
    """Return the schema of a function's arguments, with options for llguidance."""
    options = json.dumps({**_SPACED, "lenient": not function.is_strict})
    return f'{{"x-guidance":{options},{function.schema[1:]}'


def _json(schema: str) -> str:
    """Return a schema's JSON, with `::=` escaped, which llguidance takes as a sign of another dialect."""
    return "%json " + schema.replace("::=", r"::\u003d")


# --- calls in a reply -------------------------------------------------------------------------------------------------


class ReplyDelta(NamedTuple):
    """The text and calls of one step."""

    text: str = ""
    """Text to be spoken."""
    calls: tuple[CallPiece, ...] = ()


class CallReader:
    """Divides one reply into spoken text and calls.

    It keeps text back as long as that may begin the mark of a call. No text after the mark is spoken.
    """

    def __init__(self) -> None:
        self.said = 0
        """Number of characters that are spoken."""
        self.delta = ReplyDelta()
        """Text and calls of the last step."""
        self._text = ""
        # The parser reads text, not tokens, so it needs no tokenizer.
        self._parser = Hermes2ProToolParser(_NO_TOKENIZER)

    @property
    def has_begun(self) -> bool:
        """True once a call has begun, after which no text is spoken."""
        return self._parser.tool_call_start_token in self._text

    def feed(self, text: str, *, is_last: bool) -> None:
        """Take the next characters and set `delta`; the last characters release all text kept back."""
        self._text += text
        found = self._parser.extract_tool_calls_streaming("", self._text, text, (), (), (), _NO_REQUEST)
        content = "" if found is None else found.content or ""
        self.said += len(content)
        if is_last and not self.has_begun:
            content += self._text[self.said :]
            self.said = len(self._text)
        self.delta = ReplyDelta(content, tuple(map(_piece, found.tool_calls if found else ())))


def _piece(call: Any) -> CallPiece:
    return CallPiece(call.index, call.id, call.function.name, call.function.arguments or "")


_NO_TOKENIZER: Any = object()
_NO_REQUEST: Any = None
