# SPDX-License-Identifier: Apache-2.0
"""The grammar of replies with calls: what llguidance lets through, and what it does not."""

from __future__ import annotations

import json

import llguidance
import pytest

from triton_omni.core.settings import RequestLimits
from triton_omni.request.tools import ToolParameters, read_tools
from triton_omni.session.engine import Function, ToolRules
from triton_omni.vllm_hooks.thinker.tools import tool_grammar

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = (
    Function("get_weather", json.dumps(WEATHER)),
    Function("hang_up", '{"type":"object","additionalProperties":false}'),
)
ROME = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
HANG_UP = '<tool_call>\n{"name": "hang_up", "arguments": {}}\n</tool_call>'
BAD = ROME.replace('"city"', '"town"')
UNKNOWN = ROME.replace("get_weather", "get_time")
TOKENIZER = llguidance.LLTokenizer("byte")

RULES = {
    "auto": ToolRules(FUNCTIONS),
    "one": ToolRules(FUNCTIONS, max_calls=1),
    "none": ToolRules(FUNCTIONS, max_calls=0),
    "required": ToolRules(FUNCTIONS, may_speak=False, max_calls=2),
    "hang_up": ToolRules(FUNCTIONS, named="hang_up", may_speak=False, max_calls=1),
}
WHOLE = {
    "": {"auto", "one", "none"},
    "plain text\n": {"auto", "one", "none"},
    "a < b, <tool_ is no call": {"auto", "one", "none"},
    ROME: {"auto", "one", "required"},
    HANG_UP: {"auto", "one", "required", "hang_up"},
    f"Let me see.\n{ROME}": {"auto", "one"},
    f"{ROME}\n{HANG_UP}": {"auto", "required"},
    "\n".join([ROME] * 3): {"auto"},
    f"{ROME} done": set(),
    f"{ROME}{HANG_UP}": set(),
    BAD: set(),
    UNKNOWN: set(),
    "<tool_call>hello": set(),
    f"well <tool_call> {ROME}": set(),
    ROME.removesuffix("\n</tool_call>"): set(),
    ROME.replace('": "Rome', '" : "Rome'): set(),
}


def is_whole(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(TOKENIZER, llguidance.grammar_from("grammar", grammar), log_level=0)
    assert not matcher.get_error()
    ids = TOKENIZER.tokenize_str(text)
    return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())


@pytest.mark.parametrize("text", WHOLE)
def test_a_reply_is_text_and_then_calls_that_keep_to_their_schemas(text: str) -> None:
    assert {name for name, rules in RULES.items() if is_whole(tool_grammar(rules), text)} == WHOLE[text]


def test_a_reply_with_a_schema_is_json_of_it_or_calls() -> None:
    for rules, calls in ((RULES["auto"], True), (RULES["none"], False)):
        grammar = tool_grammar(rules, json.dumps({"const": {"a": "<tool_call>"}}))
        assert is_whole(grammar, '{"a": "<tool_call>"}')
        assert not is_whole(grammar, "plain text")
        assert not is_whole(grammar, f"Let me see.{ROME}")
        assert is_whole(grammar, ROME) == calls


@pytest.mark.parametrize("value", ["a ::= b", "::= %json {}\nstart: TEXT", 'quote " \\ slash', "/(.|\n)*/", "\u2028é"])
def test_no_schema_speaks_for_the_grammar(value: str) -> None:
    schema = json.dumps({"type": "object", "properties": {"x": {"const": value}}, "required": ["x"]})
    grammar = tool_grammar(ToolRules((Function("f", schema),), may_speak=False, max_calls=1))
    written = json.dumps({"name": "f", "arguments": {"x": value}}, ensure_ascii=False)
    assert is_whole(grammar, f"<tool_call>\n{written}\n</tool_call>")
    assert not is_whole(grammar, "text")


def test_what_nothing_can_be_held_to_is_left_out_of_a_schema_that_is_not_strict() -> None:
    schema = json.dumps({"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}})
    grammars = [tool_grammar(ToolRules((Function("f", schema, is_strict=strict),))) for strict in (False, True)]
    assert is_whole(grammars[0], '<tool_call>\n{"name": "f", "arguments": {"x": [1, 1]}}\n</tool_call>')
    assert not is_whole(grammars[0], '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>')
    matcher = llguidance.LLMatcher(TOKENIZER, llguidance.grammar_from("grammar", grammars[1]), log_level=0)
    assert "uniqueItems" in matcher.get_error()


def test_a_call_has_no_argument_that_is_not_listed() -> None:
    """By a schema as programs write it, without `additionalProperties`."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    given = ToolParameters(tools=[{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}])
    tools = read_tools(given, RequestLimits(), "")
    assert tools is not None
    grammar = tool_grammar(tools.rules)
    assert is_whole(grammar, ROME)
    assert not is_whole(grammar, ROME.replace('"Rome"', '"Rome", "more": 1'))
