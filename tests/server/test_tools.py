# SPDX-License-Identifier: Apache-2.0
"""Calls of functions by a real server, whose random weights call because they must."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from gateway_fakes import RunningGateway
from server.serving import Served
from triton_omni_client import HttpClient, Reply, Request

HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Now.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "hang_up"}},
]
ONE = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "Chelsie", "format": "pcm16"}}


@pytest.fixture(scope="module")
def direct(shared_server: Served) -> Reply:
    """The spoken reply that the project's own client gets."""
    return shared_server.ask("tools: direct", "hello", seed=71, **ONE)


def test_a_call_keeps_to_its_schema_and_is_not_spoken(direct: Reply) -> None:
    (call,) = direct.tool_calls
    assert call.name == "get_weather"
    jsonschema.validate(json.loads(call.arguments), WEATHER)
    assert (direct.text, len(direct.audio)) == ("", 0)
    assert direct.info is not None
    assert direct.info.finish_reason == {"thinker": "tool_calls", "talker": "stop", "token2wav": "stop"}
    assert tuple(direct.info.tool_calls) == direct.tool_calls
    assert direct.info.reply_tokens
    assert direct.info.codes == 0


def test_a_reply_that_comes_whole_has_the_same_call(server: Served, direct: Reply) -> None:
    reply = HttpClient(f"http://{server.supervisor.http_url}").unary(Request(text="hello", seed=71, **ONE))  # type: ignore[arg-type]
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [
        (call.name, call.arguments) for call in direct.tool_calls
    ]


@pytest.mark.parametrize("options", [{}, SPOKEN], ids=["text", "speech"])
@pytest.mark.parametrize("choice", ["required", ONE["tool_choice"]], ids=["required", "named"])
def test_the_official_client_gets_calls_whole_and_streamed(
    gateway: RunningGateway, direct: Reply, options: Any, choice: Any
) -> None:
    asked = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": 71}
    with gateway.openai.chat.completions.stream(model="qwen2_5_omni", **asked, **options) as stream:
        streamed = stream.get_final_completion().choices[0]
    whole = gateway.chat(**asked, **options | ({"audio": {"format": "wav"}} if options else {})).choices[0]
    for found in (streamed, whole):
        (call,) = found.message.tool_calls or ()
        assert (found.finish_reason, found.message.content or None, found.message.audio) == ("tool_calls", None, None)
        schema = WEATHER if call.function.name == "get_weather" else {"const": {}}
        jsonschema.validate(json.loads(call.function.arguments), schema)
        if choice != "required":
            assert call.function.arguments == direct.tool_calls[0].arguments


def test_where_nothing_may_be_called_the_reply_is_spoken(gateway: RunningGateway) -> None:
    options = {"messages": HELLO, "tools": TOOLS, "tool_choice": "none", "seed": 71, "max_tokens": 12}
    choice = gateway.chat(**options, modalities=["text", "audio"], audio={"format": "wav"}).choices[0]
    assert choice.message.audio.transcript
    assert choice.message.audio.data
    assert choice.message.tool_calls is None
    assert choice.finish_reason in ("stop", "length")


def test_results_go_back_and_are_answered(gateway: RunningGateway) -> None:
    said = gateway.chat(messages=HELLO, seed=71, **ONE).choices[0].message
    result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "sunny"}
    reply = gateway.chat(messages=[*HELLO, said, result], max_tokens=8, seed=71)
    assert reply.choices[0].message.content
    longer = gateway.chat(messages=[*HELLO, said, {**result, "content": "sunny " * 20}], max_tokens=8, seed=71)
    assert longer.usage.prompt_tokens > reply.usage.prompt_tokens


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOLS[1]], "tool_choice": ONE["tool_choice"]}, "tool_choice.function.name"),
        (
            {"tools": [TOOLS[1], {"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}]},
            "tools[1].function.parameters.type",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"properties": {"x": {"pattern": "(?=a)b"}}}},
                    }
                ]
            },
            "tools[0].function.parameters.properties.x.pattern",
        ),
    ],
    ids=["name", "choice", "type", "pattern"],
)
def test_bad_tools_are_refused_by_name(gateway: RunningGateway, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.chat(messages=HELLO, **options)
    assert caught.value.param == param


def test_too_many_tools_are_refused_by_name(gateway: RunningGateway) -> None:
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(129)]
    with pytest.raises(openai.APIStatusError, match="tools: 129 tools, the limit is 128") as caught:
        gateway.chat(messages=HELLO, tools=tools)
    assert (caught.value.status_code, caught.value.param) == (413, "tools")
