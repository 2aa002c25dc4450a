# SPDX-License-Identifier: Apache-2.0
"""What the backend refuses is told under the names that the caller of OpenAI's API wrote."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from client_fakes import FakeTriton, chunk, failure, serve_grpc
from gateway_fakes import MODEL, run_gateway
from media_samples import audio_file, image_file
from session_rig import finished, pipeline
from triton_omni.core.errors import OmniError
from triton_omni.core.settings import RequestLimits, TalkerEngineSettings, TalkerSettings
from triton_omni.request.media.decode import decode_media
from triton_omni.request.parse import RawRequest, RequestDefaults, parse_request
from triton_omni_client import Request, errors
from triton_omni_gateway.errors import GatewayError, Naming, from_client
from triton_omni_gateway.field_names import SPEECH_NAMES, chat_names
from triton_omni_gateway.schemas import ChatRequest, SpeechRequest, parse
from triton_omni_gateway.settings import SPEECH_PROMPT
from triton_omni_gateway.translate import chat_request, speech_request

USER = {"role": "user", "content": "hi"}
SPOKEN = {"modalities": ["text", "audio"]}
LIMITS = RequestLimits(max_stop_strings=2, max_stop_characters=4, max_request_bytes=1000)
DEFAULTS = RequestDefaults(max_thinker_tokens=100, vocabulary=50, voices=frozenset({"Chelsie", "Ethan"}))


def uri(data: bytes) -> str:
    return f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri(data)}}


def sound(data: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def chat_of(**body: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"model": "m", "messages": [USER], **body}).encode())


def by_backend(request: Request) -> str:
    """What the backend says of a request that it refuses."""
    raw = RawRequest(
        text_input=None if request.text is None else request.text.encode(),
        messages=None if request.messages is None else json.dumps(request.messages).encode(),
        sampling_parameters=json.dumps(request.sampling_parameters()).encode(),
    )
    with pytest.raises(OmniError) as caught:
        decode_media(parse_request(raw, LIMITS, DEFAULTS).media, LIMITS, with_audio=False)
    return caught.value.message


def refused_chat(**body: Any) -> GatewayError:
    chat = chat_of(**body)
    said = by_backend(chat_request(chat, {}.get, "req_1"))
    return from_client(errors.BadRequest(said), chat_names(chat).told)


def with_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


SCHEMA = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"temperature": 9}, "temperature", "temperature: must be at most 2 (got 9"),
        ({**SPOKEN, "audio": {"voice": "alloy"}}, "audio.voice", "audio.voice: 'alloy' is not one of: Chelsie, Ethan"),
        ({"max_tokens": 101}, "max_tokens", "max_tokens: 101 is over"),
        ({"max_completion_tokens": 101}, "max_completion_tokens", "max_completion_tokens: 101 is over"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "min_tokens: 4 is over max_tokens, 3"),
        ({"max_completion_tokens": 3, "min_tokens": 4}, "min_tokens", "min_tokens: 4 is over max_completion_tokens, 3"),
        ({"seed": -1}, "seed", "seed: "),
        ({"modalities": ["audio"]}, "modalities", "modalities: must be"),
        ({"stop": "abcde"}, "stop", "stop: 5 characters, the limit is 4"),
        ({"stop": ["abcde"]}, "stop[0]", "stop[0]: 5 characters, the limit is 4"),
        ({"stop": ["a", "abcde"]}, "stop[1]", "stop[1]: 5 characters, the limit is 4"),
        ({"stop": ["a", "b", "c"]}, "stop", "stop: 3 strings, the limit is 2"),
        ({"logit_bias": {"70": 1}}, "logit_bias", "logit_bias: token id 70"),
        ({"logit_bias": {"a b": 101}}, "logit_bias", "logit_bias.'a b': must be at most 100 (got 101"),
        ({"talker": {"top_q": 1}}, "talker.top_q", "talker.top_q: unknown key"),
        (
            {"talker": {"min_tokens": 2, "max_tokens": 1}},
            "talker.min_tokens",
            "talker.min_tokens: 2 is over talker.max",
        ),
        ({"token2wav": {"num_steps": 1}}, "token2wav.num_steps", "token2wav.num_steps: "),
        ({"token2wav": {"preset": ""}}, "token2wav.preset", "token2wav.preset: "),
        ({"priority": 101}, "priority", "priority: "),
        ({"timeout": 1e300}, "timeout", "timeout: 1e+300 is over"),
        ({"talker": {"x": "y" * 300_000}}, None, "the request without its 'messages': 300"),
    ],
)
def test_a_key_of_a_chat_is_named_as_it_was_written(body: dict[str, Any], param: str | None, said: str) -> None:
    refusal = refused_chat(**body)
    assert refusal.param == param
    assert refusal.message.startswith(said)


@pytest.mark.parametrize(
    ("schema", "more", "param", "said"),
    [
        ({"maxItems": 5000}, {}, f"{SCHEMA}.maxItems", f"{SCHEMA}.maxItems: 5000 is over"),
        (
            {"properties": {"a b": {"maxItems": 5000}}},
            {},
            f"{SCHEMA}.properties",
            f"{SCHEMA}.properties.'a b'.maxItems",
        ),
        ({}, {"min_tokens": 3}, "min_tokens", f"min_tokens: must be 0 beside {SCHEMA}, which"),
    ],
)
def test_a_schema_is_named_where_it_was_given(schema: dict[str, Any], more: Any, param: str, said: str) -> None:
    refusal = refused_chat(**with_schema(schema), **more)
    assert refusal.param == param
    assert refusal.message.startswith(said)


def test_a_schema_that_the_gateway_made_is_its_caller_s_format() -> None:
    refusal = refused_chat(response_format={"type": "json_object"}, min_tokens=3)
    assert refusal.message.startswith("min_tokens: must be 0 beside response_format, which")


@pytest.mark.parametrize(
    ("parts", "param", "said"),
    [
        ([image(image_file("png")), image(b"no image")], "messages[2].content[1].image_url.url", "must be one of"),
        ([image(image_file("png")), sound(b"no sound")], "messages[2].content[1].input_audio.data", "must be one of"),
        ([sound(audio_file("wav", seconds=0.001))], "messages[2].content[0].input_audio.data", "16 samples"),
        (
            [{"type": "text", "text": "x"}, {"type": "audio_url", "audio_url": {"url": uri(b"no sound")}}],
            "messages[2].content[1].audio_url.url",
            "must be one of",
        ),
        (
            [{"type": "video_url", "video_url": {"url": uri(b"no video")}}],
            "messages[2].content[0].video_url.url",
            "must be one of",
        ),
        (
            [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}],
            "messages[2].content[0].image_url.url",
            "this deployment fetches",
        ),
    ],
)
def test_a_medium_is_named_by_its_place(parts: list[Any], param: str, said: str) -> None:
    first = {"role": "user", "content": [image(image_file("png")), {"type": "text", "text": "What is it?"}]}
    kept = {"role": "assistant", "content": "A noise.", "audio": {"id": "a", "transcript": "A noise."}}
    refusal = refused_chat(messages=[first, kept, {"role": "user", "content": parts}])
    assert refusal.param == param
    assert refusal.message.startswith(f"{param}: {said}")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"use_audio_in_video": True}, "use_audio_in_video"),
        ({"mm_processor_kwargs": {"use_audio_in_video": True}}, "mm_processor_kwargs.use_audio_in_video"),
    ],
)
def test_a_video_s_sound_is_named_by_either_of_its_spellings(body: dict[str, Any], param: str) -> None:
    error = errors.BadRequest("use_audio_in_video: video 0 of the request has no audio track")
    refusal = from_client(error, chat_names(chat_of(**body)).told)
    assert (refusal.param, refusal.message) == (param, f"{param}: video 0 of the request has no audio track")


@pytest.mark.parametrize(("name", "value"), [("fps", 61), ("max_frames", 300), ("max_frames", 1), ("max_pixels", 5)])
def test_how_a_video_is_seen_is_named_as_it_was_written(name: str, value: int) -> None:
    refusal = refused_chat(messages=[USER], mm_processor_kwargs={name: value})
    assert refusal.param == f"mm_processor_kwargs.{name}"
    assert refusal.message.startswith(f"mm_processor_kwargs.{name}: ")


@pytest.mark.parametrize("role", ["developer", "system"])
def test_a_message_s_role_is_the_one_that_was_written(role: str) -> None:
    refusal = refused_chat(messages=[{"role": role, "content": [image(b"x")]}, USER])
    assert refusal.message.endswith(f"(got {role})")


def test_media_of_the_assistant_are_refused() -> None:
    refusal = refused_chat(messages=[USER, {"role": "assistant", "content": [image(b"x")]}, USER])
    assert refusal.param == "messages[1].content"
    assert "media are allowed only in messages of the role user (got assistant)" in refusal.message


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"voice": "alloi"}, "voice", "voice: 'alloi' is not one of"),
        ({"input": "x" * 1000}, "input", "input: "),
        ({"token2wav": {"solver": "x"}}, "token2wav.solver", "token2wav.solver: "),
        ({"talker": {"x": "y" * 300_000}}, None, "the request without its 'input': 300"),
    ],
)
def test_a_key_of_speech_is_named_as_it_was_written(body: dict[str, Any], param: str | None, said: str) -> None:
    speech = parse(SpeechRequest, json.dumps({"model": "m", "input": "The sea.", **body}).encode())
    error = errors.TooLarge(by_backend(speech_request(speech, SPEECH_PROMPT, "req_1")))
    refusal = from_client(error, SPEECH_NAMES.told)
    assert (refusal.status, refusal.param) == (413, param)
    assert refusal.message.startswith(said)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("messages[2].role: system is first", "messages[2].role"),
        ("num_steps: 64 points of midpoint need a larger window cache", "token2wav.num_steps"),
        ("thinker.json_schema: cannot be compiled: 'x'", "response_format"),
        ("The sea: it is deep", None),
        ("unreadable: nothing", None),
        ("medium 7 (image): is not there", None),
        ("something else", None),
    ],
)
def test_the_key_at_fault_is_read_off_the_server_s_refusal(message: str, param: str | None) -> None:
    meant = from_client(errors.BadRequest(message), chat_names(chat_of()).told)
    assert meant.param == param


@pytest.mark.parametrize(("naming", "param"), [(chat_names(chat_of()).told, "messages"), (SPEECH_NAMES.told, "input")])
def test_a_prompt_that_is_too_long_is_told_as_openai_tells_it(naming: Naming, param: str) -> None:
    said = "the prompt has 99 tokens and the reply may have 9, together 108; this deployment's limit is 100"
    meant = from_client(errors.TooLarge(said), naming)
    assert meant.status == 400
    assert meant.body()["error"] == {
        "message": f"{param}: {said}",
        "type": "invalid_request_error",
        "param": param,
        "code": "context_length_exceeded",
    }


def test_so_is_one_that_leaves_the_talker_no_room() -> None:
    with pipeline(talker_settings=TalkerSettings(engine=TalkerEngineSettings(max_model_len=64))) as stages:
        refused = finished(stages.ask("x" * 62)).error
        assert finished(stages.ask("x" * 61)).error is None
    meant = from_client(errors.TooLarge(refused.message), SPEECH_NAMES.told)
    assert meant.message == "input: the prompt has 62 tokens, which leave the talker no room in its max_model_len of 64"
    assert (meant.param, meant.code) == ("input", "context_length_exceeded")


def test_a_fault_of_the_server_names_no_key() -> None:
    meant = from_client(errors.Internal("voice: is gone"), chat_names(chat_of()).told)
    assert (meant.param, meant.message) == (None, "voice: is gone")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [USER]}, "audio.voice"),
        ("/v1/chat/completions", {"messages": [USER], "stream": True}, "audio.voice"),
        ("/v1/audio/speech", {"input": "The sea.", "stream_format": "sse"}, "voice"),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
def test_every_form_of_an_answer_has_the_caller_s_names(path: str, body: Any, param: str, begun: bool) -> None:
    with serve_grpc(FakeTriton()) as triton, run_gateway(triton.url) as gateway:
        refusal = failure("sampling_parameters.voice: is gone [omni:bad_request]")
        triton.script = lambda *_: iter([*([chunk(text="a", audio=np.zeros(9, np.float32))] if begun else []), refusal])
        answer = gateway.post({"model": MODEL, **body}, path)
    last = answer.text.strip().split("\n\n")[-1].removeprefix("data: ")
    error = json.loads(last)["error"]
    assert (error["param"], error["message"]) == (param, f"{param}: is gone")
