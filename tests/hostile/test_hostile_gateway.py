# SPDX-License-Identifier: Apache-2.0
"""Hostile bodies of OpenAI's API: a request to the server, or a refusal of the gateway's that names the key."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from hostile.judging import Bounds, measured
from hostile.sizes import cases
from hostile.strategies import ANY_JSON, DOCUMENT_NOISE, MESSAGES, NUMBERS, TEXT, as_json, damaged
from triton_omni_client import OmniClientError
from triton_omni_client.protocol import to_grpc
from triton_omni_gateway.errors import GatewayError, from_client
from triton_omni_gateway.json_bounds import MAX_TOKENS
from triton_omni_gateway.schemas import MAX_ITEMS, ChatRequest, SpeechRequest, parse
from triton_omni_gateway.translate import chat_format, chat_request, served_model, speech_request

BOUNDS = Bounds(seconds=1.0, mebibytes=16.0)
VALID = as_json(
    {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "Chelsie", "format": "wav"},
        "stop": ["a"],
        "logit_bias": {"5": 1},
        "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
        "talker": {"top_k": 5},
    }
)
BODIES = st.one_of(
    damaged(VALID, DOCUMENT_NOISE),
    DOCUMENT_NOISE,
    st.builds(
        lambda messages, more: as_json({"model": "m", "messages": messages, **more}),
        MESSAGES,
        st.dictionaries(
            st.sampled_from(
                ["temperature", "seed", "stop", "audio", "n", "tools", "talker", "response_format", "timeout", "x"]
            )
            | TEXT.filter(lambda key: key not in ("model", "messages")),
            ANY_JSON | NUMBERS,
            max_size=3,
        ),
    ),
)


def check(body: bytes, call: Any) -> None:
    def whole() -> Any:
        try:
            return to_grpc(call(body), "m")
        except OmniClientError as error:  # of a number that is not finite; the application answers so
            return from_client(error)
        except GatewayError as error:
            return error

    found, seconds, mebibytes = measured(whole)
    assert seconds < BOUNDS.seconds
    assert mebibytes < BOUNDS.mebibytes
    event(type(found).__name__)
    if isinstance(found, GatewayError):
        assert 400 <= found.status < 500
        assert found.message.isprintable(), ascii(found.message)
        assert len(found.message) < 1000


@cases(seeded=300, long=12_000)
@given(BODIES)
def test_any_chat(body: bytes) -> None:
    check(body, lambda data: chat_request(parse(ChatRequest, data), lambda _: None, "id"))


@cases(seeded=120, long=4_000)
@given(
    DOCUMENT_NOISE
    | st.builds(
        lambda text, more: as_json({"model": "m", "input": text, **more}),
        TEXT,
        st.fixed_dictionaries({}, optional={"speed": NUMBERS, "instructions": TEXT, "voice": ANY_JSON}),
    )
)
def test_any_speech(body: bytes) -> None:
    check(body, lambda data: speech_request(parse(SpeechRequest, data), "Read: {input}", "id"))


@pytest.mark.parametrize(
    "body", [b"[" * 10**6, b'{"a":' * 10**6, b'{"messages":' + b"[" * 10**6], ids=["arrays", "objects", "inside"]
)
def test_a_million_brackets_are_refused(body: bytes) -> None:
    with pytest.raises(GatewayError, match="deeper than 64 levels"):
        parse(ChatRequest, body)


CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]'


@pytest.mark.parametrize(
    "make",
    [
        lambda: CHAT + b"".join(b',"k%d":1' % number for number in range(10**6)) + b"}",
        lambda: b'{"model":"m","messages":[{"role":"user","content":[' + b"{}," * 15 * 10**6 + b"{}]}]}",
        lambda: CHAT + b',"talker":{"a":[' + b"[]," * 10**6 + b"[]]}}",
        lambda: CHAT + b',"user":' + b'"",' * 10**6,
        lambda: b'"' * 10**7,
    ],
    ids=["keys", "parts", "arrays", "strings", "quotes"],
)
@pytest.mark.parametrize("schema", [ChatRequest, SpeechRequest])
def test_millions_are_counted_before_anything_is_made_of_them(make: Callable[[], bytes], schema: Any) -> None:
    body = make()

    def call() -> str:
        with pytest.raises(GatewayError) as caught:
            parse(schema, body)
        return caught.value.message

    message, _, mebibytes = measured(call)
    assert message == f"The body has more than {MAX_TOKENS} strings, brackets and commas; send less in one request."
    assert mebibytes < 1


@pytest.mark.parametrize(
    "text", ["QUJD/" * 10**6, '"{[,' * 10**5, "\\" * 10**5, '" , [' * 10**5, "ü,{" * 10**5], ids=lambda text: text[:4]
)
def test_what_stands_in_a_string_is_not_counted(text: str) -> None:
    body = as_json({"model": "m", "messages": [{"role": "user", "content": text}]})
    assert parse(ChatRequest, body).messages[0].content == text
    assert parse(ChatRequest, body.replace(b"/", b"\\/")).messages[0].content == text


def test_a_long_chat_of_many_parts_is_taken() -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}] * MAX_ITEMS
    assert len(parse(ChatRequest, as_json({"model": "m", "messages": chat})).messages) == MAX_ITEMS


@pytest.mark.parametrize("change", [{"model": "\n\x1b"}, {"modalities": ["\n\x1b"]}, {"audio": {"format": "\n\x1b"}}])
def test_control_characters_are_escaped_in_a_refusal(change: dict[str, Any]) -> None:
    def call(body: bytes) -> Any:
        chat = parse(ChatRequest, body)
        served_model(chat.model, ("m",))
        chat_format(chat.audio, stream=False)
        return chat_request(chat, lambda _: None, "id")

    found = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **change}
    with pytest.raises(GatewayError) as caught:
        call(as_json(found))
    assert r"'\n\x1b'" in caught.value.message


def test_what_nests_within_a_part_goes_no_further_than_the_server_s_limit() -> None:
    tree: Any = "x"
    for _ in range(60):
        tree = {"a": tree}
    asked = chat_request(
        parse(
            ChatRequest,
            json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "talker": tree}).encode(),
        ),
        lambda _: None,
        "id",
    )
    assert to_grpc(asked, "m").raw_input_contents
