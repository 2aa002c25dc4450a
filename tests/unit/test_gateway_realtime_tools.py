# SPDX-License-Identifier: Apache-2.0
"""Functions in realtime sessions: what is offered, a reply that calls, and the results that go back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from client_fakes import FakeTriton, chunk, final, parameters_of, serve_grpc
from gateway_fakes import TIMEOUT_S, RunningGateway
from realtime_client import MANUAL, WHOLE, chat_of, greeting, talk

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
OFFERED = [{"type": "function", "function": {name: WEATHER[name] for name in ("name", "description", "parameters")}}]
CALL = {"call_id": "call_1", "name": "get_weather", "arguments": '{"city": "Rome"}'}


def pieces(*deltas: dict[str, Any]) -> Any:
    return chunk(info={"tool_call_deltas": list(deltas)})


def calling(_request: Any, _context: Any) -> Iterator[Any]:
    yield chunk(text="Let me see.", audio=np.zeros(240, np.float32))
    yield pieces({"index": 0, "id": "call_1", "name": "get_weather", "arguments": '{"city": '})
    yield pieces({"index": 0, "arguments": '"Rome"}'})
    yield chunk(audio=np.zeros(240, np.float32))
    yield pieces({"index": 1, "id": "call_2", "name": "get_weather", "arguments": "{}"})
    calls = [{"id": "call_1", "name": "get_weather", "arguments": '{"city": "Rome"}'}]
    reasons = {"thinker": "tool_calls", "talker": "stop", "token2wav": "stop"}
    yield chunk(info={**WHOLE, "finish_reason": reasons, "tool_calls": calls})
    yield final()


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton(calling)) as fake:
        yield fake


async def test_a_reply_speaks_and_calls_functions(triton: FakeTriton, gateway: RunningGateway) -> None:
    async with talk(gateway.base, audio=MANUAL["audio"], tools=[WEATHER], tool_choice="required") as session:
        assert session.seen[-1].session.tools[0].name == "get_weather"
        await session.say("Is it sunny in Rome?")
        session.seen.clear()
        done = (await session.asked("response.create", "response.done")).response
        said, first, second = done.output
        added = [(e.output_index, e.item.type) for e in session.seen if e.type == "response.output_item.added"]
        ended = [e for e in session.seen if e.type == "response.function_call_arguments.done"]
        deltas = [e for e in session.seen if e.type == "response.function_call_arguments.delta"]
        kept = [e.item.id for e in session.seen if e.type == "conversation.item.done"]
    assert (done.status, said.content[0].transcript) == ("completed", "Let me see.")
    assert added == [(0, "message"), (1, "function_call"), (2, "function_call")]
    assert (first.call_id, first.name, first.arguments) == tuple(CALL.values())
    assert (second.call_id, second.arguments, second.status) == ("call_2", "{}", "completed")
    assert [event.delta for event in deltas] == ['{"city": ', '"Rome"}', "{}"]
    assert [(event.name, event.arguments) for event in ended] == [
        ("get_weather", '{"city": "Rome"}'),
        ("get_weather", "{}"),
    ]
    assert kept == [said.id, first.id, second.id]
    parameters = parameters_of(triton.requests[0])
    assert (parameters["tools"], parameters["tool_choice"]) == (OFFERED, "required")


async def test_results_go_back_with_their_calls(triton: FakeTriton, gateway: RunningGateway) -> None:
    async with talk(gateway.base, audio=MANUAL["audio"], tools=[WEATHER]) as session:
        await session.say("Is it sunny in Rome?")
        await session.asked("response.create", "response.done")
        for call_id, output in (("call_1", "Sunny."), ("call_2", "Rainy.")):
            item = {"type": "function_call_output", "call_id": call_id, "output": output}
            await session.asked("conversation.item.create", "conversation.item.done", item=item)
        triton.script = greeting
        named = {"tool_choice": {"type": "function", "name": "get_weather"}, "parallel_tool_calls": False}
        await session.asked("response.create", "response.done", response=named)
    asked = triton.requests[1]
    called = [
        {"id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        for call_id, arguments in (("call_1", '{"city": "Rome"}'), ("call_2", "{}"))
    ]
    assert chat_of(asked)[1:] == [
        {"role": "assistant", "content": "Let me see.", "tool_calls": called},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
        {"role": "tool", "tool_call_id": "call_2", "content": "Rainy."},
    ]
    assert parameters_of(asked)["tool_choice"] == {"type": "function", "function": {"name": "get_weather"}}
    assert parameters_of(asked)["parallel_tool_calls"] is False


async def test_a_call_may_be_told_by_the_client(triton: FakeTriton, gateway: RunningGateway) -> None:
    triton.script = greeting
    async with talk(gateway.base, audio=MANUAL["audio"]) as session:
        await session.say("Is it sunny in Rome?")
        item = {"type": "function_call", **CALL}
        made = (await session.asked("conversation.item.create", "conversation.item.done", item=item)).item
        assert (made.call_id, made.name, made.arguments) == tuple(CALL.values())
        cut = {"item_id": made.id, "content_index": 0, "audio_end_ms": 0}
        assert (await session.refused("conversation.item.truncate", **cut)).param == "item_id"
        missing = {"type": "function_call_output", "output": "Sunny."}
        assert (await session.refused("conversation.item.create", item=missing)).param == "item.call_id"
        await session.asked("response.create", "response.done")
    assert [message["role"] for message in chat_of(triton.requests[0])] == ["user", "assistant"]
    assert "tools" not in parameters_of(triton.requests[0])


async def test_a_call_that_was_cut_off_is_not_told_to_the_model(triton: FakeTriton, gateway: RunningGateway) -> None:
    def endless(_request: Any, _context: Any) -> Iterator[Any]:
        yield pieces({"index": 0, "id": "call_1", "name": "get_weather", "arguments": '{"city": '})
        triton.cancelled.wait(TIMEOUT_S)

    triton.script = endless
    async with talk(gateway.base, audio=MANUAL["audio"], tools=[WEATHER]) as session:
        await session.say("Is it sunny in Rome?")
        await session.send("response.create")
        await session.until("response.function_call_arguments.delta")
        done = (await session.asked("response.cancel", "response.done")).response
        assert (done.status, done.output[0].status) == ("cancelled", "incomplete")
        triton.script = greeting
        await session.asked("response.create", "response.done")
    assert [message["role"] for message in chat_of(triton.requests[1])] == ["user"]
