# SPDX-License-Identifier: Apache-2.0
"""Tools, calls and their results in a prompt, as Qwen2.5's chat template writes them. Pure.

Source: `chat_template` of Qwen/Qwen2.5-7B-Instruct's tokenizer_config.json; Qwen2.5-Omni's own has no tools.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from triton_omni.request.chat import Call, Message, TextPart

_BEFORE: Final = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_AFTER: Final = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)


def listed(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the text after the system prompt: each tool, and how it is called; empty where there are none."""
    return "".join((_BEFORE, *(f"\n{_as_jinja(tool)}" for tool in tools), _AFTER)) if tools else ""


def merge_results(chat: Sequence[Message]) -> Iterator[Message]:
    """The chat with results of tools as turns of the user, adjoining ones together, and calls as text."""
    results: list[str] = []
    for message in chat:
        if message.role == "tool":
            results.append(f"<tool_response>\n{_text(message)}\n</tool_response>")
            continue
        if results:
            yield _of_the_user(results)
            results = []
        yield Message("assistant", (TextPart(_said(message)),)) if message.calls else message
    if results:
        yield _of_the_user(results)


def _of_the_user(results: Sequence[str]) -> Message:
    return Message("user", (TextPart("\n".join(results)),))


def _said(message: Message) -> str:
    text = _text(message)
    return "\n".join(([text] if text else []) + [_called(call) for call in message.calls])


def _called(call: Call) -> str:
    written = call.arguments if isinstance(call.arguments, str) else _as_jinja(call.arguments)
    return f'<tool_call>\n{{"name": "{call.name}", "arguments": {written}}}\n</tool_call>'


def _text(message: Message) -> str:
    return "".join(part.text for part in message.parts if isinstance(part, TextPart))


def _as_jinja(value: Mapping[str, Any]) -> str:
    """JSON as HF's `tojson` writes it."""
    return json.dumps(value, ensure_ascii=False)
