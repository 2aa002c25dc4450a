# SPDX-License-Identifier: Apache-2.0
"""Tools of a request, and calls and results in its chat: what may be said, and that all else is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from triton_omni.core.errors import BadRequest, TooLarge
from triton_omni.core.settings import RequestLimits
from triton_omni.request.chat import Call, Message, TextPart
from triton_omni.request.parse import OmniRequest, RawRequest, RequestDefaults, parse_request
from triton_omni.request.tools import NO_CALLS
from triton_omni.session.engine import MAX_CALLS, Function, ToolRules

LIMITS = RequestLimits(max_tools=3, max_tools_bytes=1000, max_schema_bytes=200)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}
HANG_UP = {"type": "function", "function": {"name": "hang_up"}}
CLOSED = {**PARAMETERS, "additionalProperties": False}
FUNCTIONS = (
    Function("get_weather", json.dumps(CLOSED, separators=(",", ":")), is_strict=True),
    Function("hang_up", '{"type":"object","additionalProperties":false}'),
)
USER = {"role": "user", "content": "hi"}


def function(**keys: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **keys}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def parse(messages: Any = (USER,), **parameters: Any) -> OmniRequest:
    raw = RawRequest(messages=json.dumps(list(messages)).encode(), sampling_parameters=json.dumps(parameters).encode())
    return parse_request(raw, LIMITS, RequestDefaults())


def call(name: str = "get_weather", arguments: str = '{"city": "Rome"}', **keys: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}, **keys}


@pytest.mark.parametrize(
    ("options", "rules"),
    [
        ({}, ToolRules(FUNCTIONS)),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, ToolRules(FUNCTIONS, max_calls=1)),
        ({"tool_choice": "none"}, ToolRules(FUNCTIONS, max_calls=0)),
        ({"tool_choice": "required"}, ToolRules(FUNCTIONS, may_speak=False)),
        ({"tool_choice": named("hang_up")}, ToolRules(FUNCTIONS, named="hang_up", may_speak=False, max_calls=1)),
    ],
    ids=str,
)
def test_tools_become_rules_and_are_listed_as_they_came(options: dict[str, Any], rules: ToolRules) -> None:
    request = parse(tools=[WEATHER, HANG_UP], **options)
    assert request.tools is not None
    assert request.tools.rules == rules
    assert request.tools.listed == (WEATHER, HANG_UP)
    assert request.thinker.to_sampling(1, 9, request.tools.rules).tools == rules


LISTED = {"properties": {"a": {}}}
NO_OTHERS = {**LISTED, "additionalProperties": False}


@pytest.mark.parametrize(
    ("parameters", "held"),
    [
        (LISTED, NO_OTHERS),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
        (
            {"properties": {"properties": LISTED}},
            {"properties": {"properties": NO_OTHERS}, "additionalProperties": False},
        ),
        ({"anyOf": [LISTED, {"items": LISTED}]}, {"anyOf": [NO_OTHERS, {"items": NO_OTHERS}]}),
        ({"$defs": {"x": LISTED}, "$ref": "#/$defs/x"}, {"$defs": {"x": NO_OTHERS}, "$ref": "#/$defs/x"}),
        *(
            (as_it_came, as_it_came)
            for as_it_came in (
                {},
                {**LISTED, "additionalProperties": True},
                {**LISTED, "additionalProperties": {"type": "string"}},
                {**LISTED, "required": ["a", "b"]},
                {**LISTED, "required": [["a"]]},
                {**LISTED, "required": "a"},
                {**LISTED, "minProperties": 1},
                {"properties": "a"},
                {"default": LISTED, "patternProperties": {"^x": {}}},
            )
        ),
    ],
    ids=str,
)
def test_an_object_has_the_properties_that_it_lists_unless_it_says_which(
    parameters: dict[str, Any], held: dict[str, Any]
) -> None:
    request = parse(tools=[function(parameters=parameters)])
    assert request.tools is not None
    (found,) = request.tools.rules.functions
    assert json.loads(found.schema) == {"type": "object", **held}
    assert request.tools.listed[0]["function"]["parameters"] == parameters


def test_a_request_without_tools_has_none_whatever_the_choice() -> None:
    for options in ({}, {"tools": []}, {"tool_choice": "none", "parallel_tool_calls": True}):
        assert parse(**options).tools is None


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"tools": {}}, r"tools: must be an array"),
        ({"tools": ["f"]}, r"tools\[0\]: must be an object"),
        ({"tools": [{}]}, r"tools\[0\]\.type: is required; and 1 more"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, r"tools\[0\]\.type: must be 'function'"),
        ({"tools": [{"type": "function", "function": {}}]}, r"tools\[0\]\.function\.name: is required"),
        ({"tools": [function(name="")]}, r"tools\[0\]\.function\.name: must have 1 or more characters"),
        ({"tools": [function(name="a b")]}, r"tools\[0\]\.function\.name: must have 1 to 64 of the characters A-Z"),
        ({"tools": [function(name='f"\n')]}, r"tools\[0\]\.function\.name: must have 1 to 64 of the characters"),
        ({"tools": [function(colour="red")]}, r"tools\[0\]\.function\.colour: unknown key"),
        ({"tools": [function(), function()]}, r"tools\[1\]\.function\.name: 'f' is given twice"),
        ({"tools": [function(parameters="x")]}, r"tools\[0\]\.function\.parameters: must be an object"),
        ({"tools": [function(parameters={"type": "array"})]}, r"parameters\.type: must be \"object\" \(got 'array'\)"),
        (
            {"tools": [function(parameters={"allOf": [{}, {}]})]},
            r"tools\[0\]\.function\.parameters\.allOf: 2 schemas, at most one",
        ),
        ({"tool_choice": "any"}, r"tool_choice: must be one of auto, none, required, or an object .*got 'any'"),
        ({"tool_choice": "required"}, r'tool_choice: "required" needs tools'),
        ({"tool_choice": {"type": "function"}}, r"tool_choice\.function: is required"),
        ({"tools": [HANG_UP], "tool_choice": named("g")}, r"tool_choice\.function\.name: 'g' is none of the tools"),
        ({"parallel_tool_calls": 1}, r"parallel_tool_calls: must be true or false"),
        ({"tools": [HANG_UP], "thinker": {"min_tokens": 2}}, r"thinker\.min_tokens: must be 0 beside tools"),
    ],
)
def test_wrong_tools_are_refused_by_name(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=rf"^sampling_parameters\.(.*\.)?{said}"):
        parse(**parameters)


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([function(name=f"f{number}") for number in range(4)], r"tools: 4 tools, the limit is 3"),
        ([function(description="x" * 1000)], r"tools: 1\d+ bytes without spaces, the limit is 1000"),
        (
            [function(parameters={"description": "x" * 200})],
            r"tools\[0\]\.function\.parameters: 2\d+ bytes, the limit is 200",
        ),
        ([function(parameters={"maxItems": 5000})], r"tools\[0\]\.function\.parameters\.maxItems: 5000 is over"),
    ],
    ids=["many", "long", "a long schema", "a large count"],
)
def test_too_many_and_too_large_tools_are_refused_by_name(tools: list[Any], said: str) -> None:
    with pytest.raises(TooLarge, match=rf"^sampling_parameters\.{said}"):
        parse(tools=tools)


def test_calls_and_their_results_are_turns_of_the_chat() -> None:
    asked = {"role": "assistant", "content": None, "tool_calls": [call(), call("hang_up", "")]}
    results = [{"role": "tool", "tool_call_id": "call_1", "content": "sunny"}, {"role": "tool", "content": ""}]
    request = parse([USER, asked, *results], tools=[WEATHER])
    assert request.chat[1:] == (
        Message("assistant", (TextPart(""),), (Call("get_weather", {"city": "Rome"}), Call("hang_up", {}))),
        Message("tool", (TextPart("sunny"),)),
        Message("tool", (TextPart(""),)),
    )
    spoken = {"role": "assistant", "content": [{"type": "text", "text": "Wait."}], "tool_calls": [call()]}
    assert parse([USER, spoken]).chat[1].parts == (TextPart("Wait."),)


def test_a_chat_with_calls_and_no_tools_is_answered_without_calls() -> None:
    chat = [USER, {"role": "assistant", "tool_calls": [call()]}, {"role": "tool", "content": "sunny"}]
    assert parse(chat).tools is NO_CALLS


@pytest.mark.parametrize(
    "arguments", ['{"city": "Ro', "[1]", "Rome", '{"a": 1, "a": 2}', '{"a": NaN}', "[" * 100, '{"a": "\\ud800"}']
)
def test_arguments_that_are_no_object_are_taken_as_they_were_written(arguments: str) -> None:
    """A limit may have cut them off; programs send such a call back, with a result that says so."""
    calling = {"role": "assistant", "tool_calls": [call(arguments=arguments)]}
    request = parse([USER, calling, {"role": "tool", "content": "The arguments are no JSON."}])
    assert request.chat[1].calls == (Call("get_weather", arguments),)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": "x", "tool_calls": [call()]}, r"tool_calls: only messages of the role assistant"),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, r"tool_call_id: belongs to messages of the role tool"),
        ({"role": "tool", "content": {}}, r"content: must be a string or an array of parts \(got an object"),
        (
            {"role": "tool", "content": [{"type": "image_url", "image_url": {"url": "data:;base64,YQ=="}}]},
            r"content: media are allowed only in messages of the role",
        ),
        ({"role": "assistant", "content": 0}, r"content: must be a string or an array of parts \(got 0\)"),
        ({"role": "assistant", "tool_calls": [{}]}, r"tool_calls\[0\]\.function: is required"),
        ({"role": "assistant", "tool_calls": [call("a b")]}, r"tool_calls\[0\]\.function\.name: must have 1 to 64"),
        (
            {"role": "assistant", "tool_calls": [call()] * (MAX_CALLS + 1)},
            rf"tool_calls: must have at most {MAX_CALLS} entries",
        ),
    ],
)
def test_wrong_calls_in_a_chat_are_refused_by_name(message: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=rf"^messages\[1\]\.{said}"):
        parse([USER, message])
