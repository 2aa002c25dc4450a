# SPDX-License-Identifier: Apache-2.0
"""A key that is null counts as not given at every level of a request, and null inside a JSON schema is data."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage
from openai.types.realtime import (
    RealtimeAudioConfig,
    RealtimeAudioConfigOutput,
    RealtimeFunctionTool,
    RealtimeSessionCreateRequest,
)

from triton_omni.core.errors import BadRequest
from triton_omni.core.settings import RequestLimits
from triton_omni.request.parse import OmniRequest, RawRequest, RequestDefaults, parse_request
from triton_omni_gateway.realtime.events import ClientEvent, read_event
from triton_omni_gateway.schemas import ChatRequest, parse
from triton_omni_gateway.translate import chat_request

Ask = Callable[[dict[str, Any]], OmniRequest | ClientEvent]
USER = {"role": "user", "content": "hi"}
URL = "data:image/png;base64,YQ=="
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b", None], "default": None}}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "f"}}
CALLED = {"name": "f", "arguments": "{}"}
CALL = {"id": "c", "type": "function", "function": CALLED}
CALLING = {"role": "assistant", "tool_calls": [CALL]}
REPLY = {"role": "assistant", "content": ""}
RESULT = {"role": "tool", "tool_call_id": "c", "content": ""}
AUDIO = {"data": "YQ==", "format": "wav"}


def of_server(body: dict[str, Any]) -> OmniRequest:
    """Triton's contract."""
    parameters = {key: value for key, value in body.items() if key != "messages"}
    messages = json.dumps(body.get("messages", [USER])).encode()
    raw = RawRequest(messages=messages, sampling_parameters=json.dumps(parameters).encode())
    return parse_request(raw, RequestLimits(), RequestDefaults())


def of_gateway(body: dict[str, Any]) -> OmniRequest:
    """Chat completions, as they reach the server."""
    chat = parse(ChatRequest, json.dumps({"model": "m", "messages": [USER], **body}).encode())
    request = chat_request(chat, lambda _: None, "")
    return of_server({"messages": request.messages, **request.sampling_parameters()})


def of_realtime(event: dict[str, Any]) -> ClientEvent:
    """Events of realtime sessions."""
    return read_event(json.dumps(event).encode())


def said(**message: Any) -> dict[str, Any]:
    return {"messages": [{**USER, **message}]}


def shown(part: dict[str, Any]) -> dict[str, Any]:
    return said(content=[part])


def history(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [USER, *messages]}


def update(**session: Any) -> dict[str, Any]:
    return {"type": "session.update", "session": {"type": "realtime", **session}}


def respond(**response: Any) -> dict[str, Any]:
    return {"type": "response.create", "response": response}


TEXT = {"type": "text", "text": "hi"}
SOUND = {"type": "input_audio", "input_audio": AUDIO}
PICTURE = {"type": "image_url", "image_url": {"url": URL}}
LATER = {"format": {"type": "audio/pcm"}}
VAD = {"type": "server_vad"}

BOTH: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (said(tool_calls=None, name=None, x=None), {}),
    (shown({**TEXT, "image_url": None, "cache_control": None}), shown(TEXT)),
    (shown({**PICTURE, "image_url": {"url": URL, "detail": None}, "text": None}), shown(PICTURE)),
    (shown({**SOUND, "input_audio": {**AUDIO, "x": None}}), shown(SOUND)),
    ({"tools": [{**TOOL, "x": None}]}, {"tools": [TOOL]}),
    ({"tools": [{**TOOL, "function": {**FUNCTION, "x": None, "description": None}}]}, {"tools": [TOOL]}),
    ({"tools": [{**NAMED, "function": {"name": "f", "parameters": None}}]}, {"tools": [NAMED]}),
    ({"tools": [TOOL], "tool_choice": {**NAMED, "mode": None}}, {"tools": [TOOL], "tool_choice": NAMED}),
    ({"tools": [TOOL], "tool_choice": None, "parallel_tool_calls": None}, {"tools": [TOOL]}),
    (history({**CALLING, "tool_calls": [{**CALL, "index": None}], "content": None}, RESULT), history(CALLING, RESULT)),
    (history({**CALLING, "tool_calls": [{**CALL, "index": 0}]}, RESULT), history(CALLING, RESULT)),
    (history({**CALLING, "tool_calls": [{"function": {**CALLED, "parsed_arguments": None}}]}), history(CALLING)),
    (history({**CALLING, "tool_calls": [{"function": {**CALLED, "parsed_arguments": {}}}]}), history(CALLING)),
    (history({**CALLING, "content": []}, {**RESULT, "content": None}), history(CALLING, RESULT)),
    (history(CALLING, {**RESULT, "content": []}), history(CALLING, RESULT)),
    (history({**REPLY, "content": None}), history(REPLY)),
    (history({"role": "assistant", "tool_calls": None}, USER), history(REPLY, USER)),
    (history({"role": "assistant", "content": [], "tool_calls": []}, USER), history(REPLY, USER)),
    ({"talker": {"temperature": None, "x": None}}, {}),
    ({"token2wav": {"preset": None, "x": None}}, {}),
    ({"mm_processor_kwargs": {"fps": None, "x": None}}, {}),
    ({"talker": None, "token2wav": None, "mm_processor_kwargs": None, "seed": None, "x": None}, {}),
]
SERVER: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"thinker": None, "modalities": None, "audio_format": None, "priority": None, "cache": None}, {}),
    ({"thinker": {"temperature": None, "stop": None, "logit_bias": None, "json_schema": None, "x": None}}, {}),
    ({"thinker": {"logit_bias": {"5": None, "6": 1}}}, {"thinker": {"logit_bias": {"6": 1}}}),
]
REPLIED = ChatCompletionMessage(role="assistant", content="Hello.", annotations=[])
GATEWAY: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"logit_bias": {"5": None, "6": 1}}, {"logit_bias": {"6": 1}}),
    ({"response_format": {"type": "text", "json_schema": None}, "stream_options": {"x": None}}, {}),
    (history(REPLIED.model_dump(), USER), history({"role": "assistant", "content": "Hello."}, USER)),
    (history({**REPLIED.model_dump(), "parsed": {"a": 1}}), history({"role": "assistant", "content": "Hello."})),
    (history(ChatCompletionMessage(role="assistant").model_dump(), USER), history(REPLY, USER)),
    (history({**REPLIED.model_dump(), "content": "", "tool_calls": []}), history(REPLY)),
]
TELLS = {"type": "function", "name": "f", "parameters": SCHEMA}
SAID = {"type": "output_text", "text": "hi"}
ITEM = {"type": "message", "role": "assistant"}
REALTIME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (update(instructions=None, x=None, audio=None, tracing=None, prompt=None), update()),
    (update(audio={"input": None, "output": {"voice": None, "speed": None, "x": None}}), update()),
    (update(audio={"output": {"format": {"type": "audio/pcm", "rate": None}}}), update(audio={"output": LATER})),
    (
        update(audio={"input": {"turn_detection": {**VAD, "threshold": None, "eagerness": None}}}),
        update(audio={"input": {"turn_detection": VAD}}),
    ),
    (update(tools=[{**TELLS, "description": None, "x": None}]), update(tools=[TELLS])),
    (
        update(tool_choice={"type": "function", "name": "f", "mode": None}),
        update(tool_choice={"type": "function", "name": "f"}),
    ),
    (respond(metadata={"a": None, "b": "c"}, audio={"output": {"format": None}}), respond(metadata={"b": "c"})),
    (
        respond(input=[{**ITEM, "content": [{**SAID, "audio": None, "x": None}], "id": None}]),
        respond(input=[{**ITEM, "content": [SAID]}]),
    ),
    (
        update(
            **RealtimeSessionCreateRequest(
                type="realtime",
                audio=RealtimeAudioConfig(output=RealtimeAudioConfigOutput()),
                tools=[RealtimeFunctionTool(type="function", name="f", parameters=SCHEMA)],
            ).model_dump()
        ),
        update(tools=[TELLS]),
    ),
]


@pytest.mark.parametrize(
    ("ask", "nulls", "same"),
    [
        *((ask, *case) for ask in (of_server, of_gateway) for case in BOTH),
        *((of_server, *case) for case in SERVER),
        *((of_gateway, *case) for case in GATEWAY),
        *((of_realtime, *case) for case in REALTIME),
    ],
    ids=lambda value: value.__name__ if callable(value) else json.dumps(value),
)
def test_a_key_that_is_null_is_as_one_that_is_not_given(ask: Ask, nulls: dict[str, Any], same: dict[str, Any]) -> None:
    assert ask(nulls) == ask(same)


@pytest.mark.parametrize("ask", [of_server, of_gateway])
def test_null_in_the_schema_of_a_tool_is_data(ask: Callable[[dict[str, Any]], OmniRequest]) -> None:
    tools = ask({"tools": [TOOL]}).tools
    assert tools is not None
    assert tools.listed == (TOOL,)
    assert json.loads(tools.rules.functions[0].schema) == {**SCHEMA, "additionalProperties": False}


def test_null_in_the_schema_of_a_reply_is_data() -> None:
    wrapped = {"type": "json_schema", "json_schema": {"name": None, "schema": SCHEMA}}
    assert of_gateway({"response_format": wrapped}).thinker.json_schema == SCHEMA
    assert of_server({"thinker": {"json_schema": SCHEMA}}).thinker.json_schema == SCHEMA


def test_null_in_the_schema_of_a_realtime_tool_is_data() -> None:
    event: Any = of_realtime(update(tools=[{**TELLS, "description": None}]))
    assert event.session.tools[0].function() == FUNCTION


@pytest.mark.parametrize("key", ["turn_detection", "transcription", "noise_reduction"])
def test_what_a_session_turns_off_by_null_is_given(key: str) -> None:
    event: Any = of_realtime(update(audio={"input": {key: None, "format": None}}))
    assert event.session.audio.input.model_fields_set == {key}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (said(content=None), "content: must be a string or an array of parts"),
        (said(role=None), "role: is required"),
        (shown({"type": "text", "text": None}), r"text: is required"),
        ({"tools": [{"type": "function", "function": None}]}, r"tools\[0\]\.function: is required"),
        ({"tools": [{**TOOL, "function": {**FUNCTION, "parameters": {"type": None}}}]}, r"type: .*\(got null\)"),
        ({"tools": [None]}, r"tools\[0\]: must be an object \(got null\)"),
        ({"messages": [None]}, r"messages\[0\]: must be an object \(got null\)"),
    ],
    ids=json.dumps,
)
def test_null_stands_in_for_nothing_that_is_needed(body: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        of_server(body)
