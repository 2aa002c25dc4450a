# SPDX-License-Identifier: Apache-2.0
"""Calls of functions through the client: streamed in pieces, whole in one answer, from servers of any kind."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from client_fakes import (
    INFO,
    FakeHttp,
    FakeTriton,
    chunk,
    final,
    http_answer,
    inputs_of,
    parameters_of,
    serve_grpc,
    serve_http,
)
from triton_omni_client import HttpClient, Internal, OmniClient, Request, TextDelta, ToolCall, ToolCallDelta

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALLS = [
    {"id": "a", "name": "get_weather", "arguments": '{"city": "Rome"}'},
    {"id": "b", "name": "get_weather", "arguments": "{}"},
]
WHOLE = tuple(ToolCall(**call) for call in CALLS)
ACCOUNT = INFO | {
    "tool_calls": CALLS,
    "finish_reason": {"thinker": "tool_calls", "talker": "stop", "token2wav": "stop"},
}
PIECES = [
    {"index": 0, "id": "a", "name": "get_weather", "arguments": ""},
    {"index": 0, "arguments": '{"city": '},
    {"index": 0, "arguments": '"Rome"}'},
    {"index": 1, "id": "b", "name": "get_weather", "arguments": "{}"},
]


def calling(_request: Any, _context: Any) -> Any:
    yield chunk(text="Wait.", audio=np.full(4, 0.25, np.float32))
    yield chunk(info={"tool_call_deltas": PIECES[:2]})
    yield chunk(audio=np.full(4, 0.5, np.float32), info={"tool_call_deltas": PIECES[2:]})
    yield chunk(info=ACCOUNT)
    yield final()


def test_pieces_of_calls_come_as_deltas_beside_text_and_speech() -> None:
    request = Request(text="hi", tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    with serve_grpc(FakeTriton(script=calling)) as triton, OmniClient(triton.url) as client:
        with client.stream(request) as stream:
            deltas = list(stream)
        reply = stream.reply()
        asked = parameters_of(triton.requests[0])
    assert asked == {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    assert [delta for delta in deltas if isinstance(delta, ToolCallDelta)] == [
        ToolCallDelta(0, "a", "get_weather"),
        ToolCallDelta(0, arguments='{"city": '),
        ToolCallDelta(0, arguments='"Rome"}'),
        ToolCallDelta(1, "b", "get_weather", "{}"),
    ]
    assert [delta.text for delta in deltas if isinstance(delta, TextDelta)] == ["Wait."]
    assert (reply.text, len(reply.audio), reply.tool_calls) == ("Wait.", 8, WHOLE)
    assert reply.info is not None
    assert (tuple(reply.info.tool_calls), reply.info.finish_reason["thinker"]) == (WHOLE, "tool_calls")


def test_a_reply_that_comes_whole_has_its_calls_too() -> None:
    with serve_http(FakeHttp(lambda: http_answer(text="Wait.", info=ACCOUNT))) as server:
        reply = HttpClient(server.url).unary(Request(text="hi", tools=[TOOL]))
        parameters = json.loads(server.inputs["sampling_parameters"][0])
    assert (reply.text, reply.tool_calls) == ("Wait.", WHOLE)
    assert parameters == {"tools": [TOOL]}


def test_a_reply_of_a_server_that_knows_no_calls_has_none() -> None:
    with serve_grpc(FakeTriton()) as triton, OmniClient(triton.url) as client:
        reply = client.say("hi")
        assert "sampling_parameters" not in inputs_of(triton.requests[0])
    assert reply.tool_calls == ()


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"tool_call_deltas": {}}, "tool_call_deltas: expected a list"),
        ({"tool_call_deltas": ["x"]}, "tool_call_deltas: expected an object"),
        ({"tool_call_deltas": [{"index": "0"}]}, "index is '0', expected int"),
        ({"tool_calls": [{"id": 1}]}, "id is 1, expected str"),
    ],
    ids=str,
)
def test_a_broken_server_is_told_by_name(info: dict[str, Any], said: str) -> None:
    with serve_grpc(FakeTriton(script=lambda *_: iter([chunk(info=info)]))) as triton, OmniClient(triton.url) as client:
        stream = client.stream(Request(text="hi"))
        with pytest.raises(Internal, match=f"info.*{said}"):
            stream.collect()
