# SPDX-License-Identifier: Apache-2.0
"""Calls of functions through the gateway, asked by the official `openai` client, with a scripted Triton behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from client_fakes import FakeTriton, chunk, failure, final, inputs_of, parameters_of, serve_grpc
from gateway_fakes import MODEL, USER, RunningGateway
from triton_omni.core.settings import RequestLimits
from triton_omni.request.chat import Call, TextPart
from triton_omni.request.parse import RawRequest, RequestDefaults, parse_request
from unit.test_client_tools import ACCOUNT, CALLS, PIECES, TOOL, calling

AUDIO = {"modalities": ["text", "audio"], "audio": {"voice": "Chelsie", "format": "wav"}}
CALLED = [
    {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
    for call in CALLS
]


def silent(_request: Any, _context: Any) -> Iterator[Any]:
    yield chunk(info={"tool_call_deltas": PIECES})
    yield chunk(info=ACCOUNT)
    yield final()


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton(script=calling)) as fake:
        yield fake


def messages_of(triton: FakeTriton) -> Any:
    return json.loads(inputs_of(triton.requests[-1])["messages"][0])


@pytest.mark.parametrize("choice", [None, "auto", "none", "required", {"type": "function", "function": {"name": "f"}}])
def test_tools_reach_the_server_as_they_came(triton: FakeTriton, gateway: RunningGateway, choice: Any) -> None:
    options = {} if choice is None else {"tool_choice": choice, "parallel_tool_calls": False}
    gateway.chat(tools=[TOOL], **options)
    assert parameters_of(triton.requests[0]) == {"modalities": ["text"], "tools": [TOOL], **options}


def test_a_whole_reply_has_its_calls(gateway: RunningGateway) -> None:
    (choice,) = gateway.chat(tools=[TOOL]).choices
    assert [call.model_dump() for call in choice.message.tool_calls] == CALLED
    assert (choice.message.content, choice.finish_reason) == ("Wait.", "tool_calls")


def test_a_spoken_reply_is_heard_and_its_calls_are_not(gateway: RunningGateway) -> None:
    (choice,) = gateway.chat(tools=[TOOL], **AUDIO).choices
    assert (choice.message.content, choice.message.audio.transcript) == (None, "Wait.")
    assert [call.model_dump() for call in choice.message.tool_calls] == CALLED


@pytest.mark.parametrize("options", [{}, AUDIO], ids=["text", "speech"])
def test_a_reply_of_calls_alone_has_neither_content_nor_audio(
    triton: FakeTriton, gateway: RunningGateway, options: Any
) -> None:
    triton.script = silent
    message = gateway.chat(tools=[TOOL], **options).choices[0].message
    assert (message.content, message.audio, len(message.tool_calls)) == (None, None, 2)
    deltas = [found.choices[0].delta for found in gateway.chat(tools=[TOOL], stream=True, **options)]
    assert not any(delta.content for delta in deltas)
    assert not any(getattr(delta, "audio", None) for delta in deltas)


@pytest.mark.parametrize("options", [{}, AUDIO], ids=["text", "speech"])
def test_streamed_calls_come_in_openai_s_pieces(gateway: RunningGateway, options: Any) -> None:
    chunks = list(gateway.chat(tools=[TOOL], stream=True, **options))
    pieces = [call for found in chunks for call in found.choices[0].delta.tool_calls or ()]
    assert [piece.model_dump(exclude_unset=True) for piece in pieces] == [
        {"index": 0, "id": "a", "type": "function", "function": {"name": "get_weather", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"city": '}},
        {"index": 0, "function": {"arguments": '"Rome"}'}},
        {"index": 1, "id": "b", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}},
    ]
    assert [found.choices[0].finish_reason for found in chunks if found.choices[0].finish_reason] == ["tool_calls"]
    if options:
        audio = [found.choices[0].delta.audio for found in chunks if getattr(found.choices[0].delta, "audio", None)]
        assert [part.transcript for part in audio if part.transcript] == ["Wait."]
        assert any(part.data for part in audio)


def test_the_official_client_puts_a_streamed_call_together(gateway: RunningGateway) -> None:
    with gateway.openai.chat.completions.stream(model=MODEL, messages=USER, tools=[TOOL]) as stream:  # type: ignore[arg-type, list-item]
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert [(event.name, event.arguments) for event in done] == [(call["name"], call["arguments"]) for call in CALLS]
    assert calls is not None
    assert [call.id for call in calls] == ["a", "b"]


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str | None = None


def test_the_official_client_s_own_form_of_a_tool_is_taken(triton: FakeTriton, gateway: RunningGateway) -> None:
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    gateway.chat(tools=[tool], tool_choice={"type": "function", "function": {"name": "get_weather"}})
    assert parameters_of(triton.requests[0])["tools"] == [tool]


def test_calls_and_their_results_go_back_as_they_came(triton: FakeTriton, gateway: RunningGateway) -> None:
    said = gateway.chat(tools=[TOOL]).choices[0].message
    result = {"role": "tool", "tool_call_id": "a", "content": "sunny"}
    gateway.chat(messages=[*USER, said.model_dump(), result])
    asked = {"role": "assistant", "content": "Wait.", "tool_calls": CALLED}
    assert messages_of(triton) == [*USER, asked, result]
    gateway.chat(messages=[*USER, {"role": "assistant", "content": None, "tool_calls": CALLED}, result])
    assert messages_of(triton)[1] == {"role": "assistant", "tool_calls": CALLED}


@pytest.mark.parametrize("form", [lambda message: message, lambda message: message.model_dump()], ids=["whole", "dump"])
@pytest.mark.parametrize("options", [{}, AUDIO], ids=["text", "speech"])
def test_what_the_official_client_made_of_a_stream_goes_back(
    triton: FakeTriton, gateway: RunningGateway, options: Any, form: Any
) -> None:
    """Its messages have keys of its own, such as each call's place in the stream; the server must take what is left."""
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    with gateway.openai.chat.completions.stream(model=MODEL, messages=USER, tools=[tool], **options) as stream:
        said = stream.get_final_completion().choices[0].message
    gateway.chat(messages=[*USER, form(said), {"role": "tool", "tool_call_id": "a", "content": None}])
    raw = RawRequest(messages=json.dumps(messages_of(triton)).encode())
    chat = parse_request(raw, RequestLimits(), RequestDefaults()).chat
    assert [(message.role, *message.parts) for message in chat[1:]] == [
        ("assistant", TextPart("Wait.")),
        ("tool", TextPart("")),
    ]
    assert chat[1].calls == (Call("get_weather", {"city": "Rome"}), Call("get_weather", {}))


def test_a_spoken_reply_with_calls_can_be_named_by_its_id(triton: FakeTriton, gateway: RunningGateway) -> None:
    said = gateway.chat(tools=[TOOL], **AUDIO).choices[0].message
    earlier = {"role": "assistant", "audio": {"id": said.audio.id}, "tool_calls": CALLED}
    gateway.chat(messages=[*USER, earlier, {"role": "tool", "tool_call_id": "a", "content": "sunny"}])
    assert messages_of(triton)[1] == {"role": "assistant", "content": "Wait.", "tool_calls": CALLED}


@pytest.mark.parametrize(
    ("refusal", "param"),
    [
        ("sampling_parameters.tools[1].function.name: 'f' is given twice", "tools[1].function.name"),
        ("sampling_parameters.tools: 200 tools, the limit is 128", "tools"),
        ("tools[0].function.parameters.properties.x.pattern: cannot be compiled: '('", None),
        ("sampling_parameters.tool_choice.function.name: 'g' is none of the tools", "tool_choice.function.name"),
        ("messages[1].tool_calls[0].function.name: must have 1 to 64 characters", None),
        ("sampling_parameters.thinker.min_tokens: must be 0 beside tools, whose calls say", "min_tokens"),
    ],
)
def test_the_server_s_refusals_name_the_caller_s_key(
    triton: FakeTriton, gateway: RunningGateway, refusal: str, param: str | None
) -> None:
    triton.script = lambda *_: iter([failure(f"{refusal} [omni:bad_request;stage=thinker]")])
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.chat(tools=[TOOL])
    assert caught.value.param == (param or refusal.partition(": ")[0])
    assert f"{caught.value.param}: {refusal.partition(': ')[2]}" in caught.value.message


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"tools": {}}, "tools", "valid array"),
        ({"tools": ["f"]}, "tools[0]", '"f" should be'),
        ({"tool_choice": 1}, "tool_choice", "valid"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "valid boolean"),
        ({"tools": [TOOL], "ignore_eos": True, "max_tokens": 3}, "ignore_eos", "cannot be given with 'tools'"),
        ({"messages": [{"role": "assistant", "tool_calls": "f"}]}, "messages[0].tool_calls", "valid array"),
        ({"messages": [{"role": "tool", "content": 5}]}, "messages[0].content", "5 should be a valid"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "'tool'"),
        ({"functions": []}, "functions", "Unknown parameter"),
    ],
    ids=str,
)
def test_what_is_no_tool_is_refused_by_name(
    triton: FakeTriton, gateway: RunningGateway, body: dict[str, Any], param: str, said: str
) -> None:
    answer = gateway.post({"model": MODEL, "messages": USER, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert said in error["message"]
    assert triton.requests == []
