# SPDX-License-Identifier: Apache-2.0
"""OpenAI's requests as the server is asked: what is passed on, what is taken without effect, what is refused."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import pytest

from triton_omni.core.settings import RequestLimits
from triton_omni.request.parse import RawRequest, RequestDefaults, parse_request
from triton_omni_client import Request
from triton_omni_gateway.errors import GatewayError
from triton_omni_gateway.schemas import ChatRequest, SpeechRequest, parse
from triton_omni_gateway.settings import SPEECH_PROMPT
from triton_omni_gateway.transcripts import Transcripts
from triton_omni_gateway.translate import cache_salt, chat_request, speech_request

USER = [{"role": "user", "content": "hi"}]
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(8)).decode()
PARTS = [
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
    {"type": "input_audio", "input_audio": {"data": PNG, "format": "wav"}},
    {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{PNG}"}},
    {"type": "text", "text": "What is this?"},
]


def asked(**body: Any) -> Request:
    return chat_request(parsed(**body), {"audio_1": "Hello."}.get, "req_1")


def parsed(**body: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"model": "m", "messages": USER, **body}).encode())


def refused(**body: Any) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        asked(**body)
    assert caught.value.status == 400
    return caught.value


def test_the_backend_accepts_all_media_of_a_chat() -> None:
    request = asked(messages=[{"role": "user", "content": PARTS}])
    raw = RawRequest(messages=json.dumps(request.messages).encode())
    understood = parse_request(raw, RequestLimits(), RequestDefaults())
    assert [part.kind for part in understood.media] == ["image", "audio", "video"]
    assert {part.data for part in understood.media} == {base64.b64decode(PNG)}


def test_null_is_not_given_of_a_known_key_and_of_an_unknown_one() -> None:
    nulls = {
        "temperature": None,
        "tools": None,
        "audio": None,
        "web_search_options": None,
        "stream_options": {"x": None},
    }
    assert asked(**nulls) == asked(stream_options={})
    assert refused(web_search_options={}).param == "web_search_options"
    with pytest.raises(GatewayError, match="Missing required parameter: 'model'"):
        parse(ChatRequest, json.dumps({"model": None, "messages": USER}).encode())


@pytest.mark.parametrize("before", ["", "data:audio/wav;base64,", "data:;base64,"])
@pytest.mark.parametrize("line", [8, 76])
def test_sound_may_be_a_data_uri_and_have_line_breaks(before: str, line: int) -> None:
    broken = before + "\r\n".join(PNG[at : at + line] for at in range(0, len(PNG), line))
    part = {"type": "input_audio", "input_audio": {"data": broken, "format": "wav"}}
    (message,) = asked(messages=[{"role": "user", "content": [part]}]).messages or ()
    assert message["content"] == [{"type": "input_audio", "input_audio": {"data": PNG, "format": "wav"}}]


@pytest.mark.parametrize("other", [("b", "talk"), ("a", "another"), ("a", None), ("", "talk")])
def test_a_caller_and_a_cache_key_share_with_themselves_alone(other: tuple[str, str | None]) -> None:
    salt = cache_salt("a", "talk")
    assert cache_salt("a", "talk") == salt != cache_salt(*other)
    assert "talk" not in str(salt)


def test_a_request_without_a_caller_and_a_key_has_no_salt() -> None:
    assert asked().cache_salt is None
    assert asked(prompt_cache_key="talk").cache_salt == cache_salt("", "talk")


@pytest.mark.parametrize("key", ["talk", "\u96ea", "x" * 9999], ids=["word", "other letters", "long"])
def test_the_backend_accepts_the_salt_of_any_key(key: str) -> None:
    parameters = json.dumps(asked(prompt_cache_key=key, cache=False).sampling_parameters()).encode()
    assert parse_request(
        RawRequest(text_input=b"Hi", sampling_parameters=parameters), RequestLimits(), RequestDefaults()
    )
    assert json.loads(parameters)["cache"] is False


@pytest.mark.parametrize(
    ("body", "caller", "taken"),
    [
        ({"prompt_cache_key": "talk"}, "", True),
        ({}, "a key's digest", True),
        ({"prompt_cache_key": "talk", "cache": True}, "a key's digest", True),
        ({}, "", False),
        ({"prompt_cache_key": ""}, "", False),
        ({"prompt_cache_key": "talk", "cache": False}, "a key's digest", False),
    ],
)
def test_a_prompt_is_prefilled_where_a_later_request_can_find_it(
    body: dict[str, Any], caller: str, taken: bool
) -> None:
    chat = parsed(prefill_only=True, **body)
    if taken:
        assert chat_request(chat, {}.get, "req_1", caller).prefill_only is True
        return
    with pytest.raises(GatewayError, match=r"'prefill_only' needs an API key or 'prompt_cache_key'") as caught:
        chat_request(chat, {}.get, "req_1", caller)
    assert (caught.value.status, caught.value.param) == (400, "prefill_only")


@pytest.mark.parametrize("name", ["prefill_only", "audio_in_pieces"])
def test_the_backend_understands_the_keys_of_a_hint(name: str) -> None:
    assert name not in asked(prompt_cache_key="talk").sampling_parameters()
    for value in (True, False):
        parameters = json.dumps(asked(prompt_cache_key="talk", **{name: value}).sampling_parameters()).encode()
        raw = RawRequest(text_input=b"Hi", sampling_parameters=parameters)
        assert getattr(parse_request(raw, RequestLimits(), RequestDefaults()), name) is value
    assert refused(prompt_cache_key="talk", **{name: "yes"}).param == name


@pytest.mark.parametrize("url", ["https://example.org/a.png", "file:///etc/passwd"])
def test_urls_are_given_on_and_the_server_decides(url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    assert asked(messages=[{"role": "user", "content": [part]}]).messages == [{"role": "user", "content": [part]}]


@pytest.mark.parametrize("detail", ["auto", "low", "high"])
def test_the_detail_of_an_image_has_no_effect(detail: str) -> None:
    image = {"url": "data:image/png;base64,AA=="}
    part = {"type": "image_url", "image_url": {**image, "detail": detail}}
    (message,) = asked(messages=[{"role": "user", "content": [part]}]).messages or ()
    assert message["content"] == [{"type": "image_url", "image_url": image}]


@pytest.mark.parametrize(
    "image", ["data:image/png;base64,AA==", {"url": "data:image/png;base64,AA==", "detail": "so-so"}]
)
def test_what_an_image_must_not_be_is_given_on_and_the_server_refuses_it(image: Any) -> None:
    content = [{"type": "image_url", "image_url": image}]
    assert asked(messages=[{"role": "user", "content": content}]).messages == [{"role": "user", "content": content}]


def test_a_developer_speaks_as_the_system() -> None:
    (first, _) = asked(messages=[{"role": "developer", "content": "Be brief."}, *USER]).messages or ()
    assert first == {"role": "system", "content": "Be brief."}


def test_sampling_goes_to_the_thinker_under_the_server_s_names() -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "logit_bias": {"50": -100},
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
    }
    assert asked(**given, stop="\n", max_completion_tokens=9).thinker == {**given, "stop": ["\n"], "max_tokens": 9}
    assert asked(max_tokens=4, stop=["a", "b"]).thinker == {"max_tokens": 4, "stop": ["a", "b"]}
    assert asked().thinker == {}


def test_the_backend_accepts_the_sampling_that_both_know() -> None:
    request = asked(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        presence_penalty=1,
        stop="\n",
        logit_bias={"5": 1},
        response_format={"type": "json_object"},
        max_tokens=8,
        seed=3,
        talker={"top_k": 4},
        priority=2,
    )
    raw = RawRequest(text_input=b"hi", sampling_parameters=json.dumps(request.sampling_parameters()).encode())
    understood = parse_request(raw, RequestLimits(), RequestDefaults())
    assert (understood.thinker.top_p, understood.thinker.max_tokens, understood.talker.top_k) == (0.9, 8, 4)
    assert (understood.seed, understood.modalities) == (3, ("text",))


def test_a_format_of_the_reply_is_a_schema_for_the_thinker() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wrapped = {"name": "answer", "schema": schema, "strict": True}
    assert asked(response_format={"type": "json_schema", "json_schema": wrapped}).thinker == {"json_schema": schema}
    assert asked(response_format={"type": "json_object"}).thinker == {"json_schema": {"type": "object"}}


def test_a_length_may_be_given_under_both_names() -> None:
    assert asked(max_tokens=3, max_completion_tokens=3).thinker == {"max_tokens": 3}


def test_a_request_s_priority_is_passed_on() -> None:
    assert asked(priority=-3).priority == -3


def test_a_reply_of_a_given_length_for_load_generators() -> None:
    assert asked(ignore_eos=True, max_tokens=5).thinker == {"min_tokens": 5, "max_tokens": 5}
    as_text = {"response_format": {"type": "text"}}
    assert asked(ignore_eos=True, max_tokens=5, **as_text).thinker == {"min_tokens": 5, "max_tokens": 5}
    assert refused(ignore_eos=True).param == "ignore_eos"


@pytest.mark.parametrize("extra", [{"use_audio_in_video": True}, {"mm_processor_kwargs": {"use_audio_in_video": True}}])
def test_a_video_s_sound_is_heard_where_asked_for(extra: dict[str, Any]) -> None:
    assert asked(**extra).use_audio_in_video is True


def test_how_a_video_is_seen_is_passed_on_as_vllm_s_callers_say_it() -> None:
    chosen = {"fps": 0.5, "max_frames": 64, "max_pixels": 401408}
    assert asked(mm_processor_kwargs={"use_audio_in_video": True, **chosen}).mm_processor_kwargs == chosen
    assert asked(mm_processor_kwargs={"use_audio_in_video": True}).mm_processor_kwargs == {}
    assert refused(mm_processor_kwargs={"num_frames": 3}).param == "mm_processor_kwargs.num_frames"
    assert refused(mm_processor_kwargs={"fps": "2"}).param == "mm_processor_kwargs.fps"


@pytest.mark.parametrize(
    "extra",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "s"},
        {"prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "explicit"}},
        {"reasoning_effort": "none", "verbosity": "low", "prediction": {"type": "content", "content": "x"}},
        {"n": 1, "logprobs": False, "top_logprobs": 0, "response_format": {"type": "text"}, "tools": []},
        {"temperature": None, "stop": None, "audio": None, "stream": None, "stream_options": None, "tools": None},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}},
    ],
)
def test_what_changes_nothing_is_taken(extra: dict[str, Any]) -> None:
    assert asked(**extra) == asked()


@pytest.mark.parametrize(
    ("extra", "param", "what"),
    [
        ({"nonsense": 1}, "nonsense", "Unknown parameter: 'nonsense'"),
        ({"web_search_options": {}}, "web_search_options", "Unknown parameter"),
        ({"reasoning_effort": 1}, "reasoning_effort", "valid string"),
        ({"max-tokens": 1}, "max-tokens", "Unknown parameter: 'max-tokens'"),
        ({"audio": {"str": 1}}, "audio.str", "Unknown parameter: 'audio.str'"),
        ({"messages": [{"role": "user", "content": "x", "a b": 1}]}, "messages[0].a b", "Unknown parameter"),
        ({"n": 2}, "n", "^Invalid value for 'n': 2 should be 1.$"),
        ({"logprobs": True}, "logprobs", ": true should be false.$"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "\"xml\" should be 'text'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", ": json_schema .* must be given"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
            "Missing",
        ),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "'system', 'developer', 'user'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "Missing required parameter"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "5 should be a valid"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]", "dictionary|object"),
        ({"messages": [{"role": "user", "audio": {"id": "audio_1"}}]}, "messages[0].audio", "assistant"),
        ({"messages": [{"role": "assistant", "audio": {"id": "audio_2"}}]}, "messages[0].audio.id", "expired"),
        ({"modalities": ["text", "smell"]}, "modalities", "none of text, audio"),
        ({"audio": {"voice": "Ethan"}}, "audio", "does not hold"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "give one"),
        (
            {"ignore_eos": True, "max_tokens": 1, "response_format": {"type": "json_object"}},
            "ignore_eos",
            "which says when",
        ),
        ({"timeout": -1}, "timeout", "-1 should be greater than 0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type",
            "one of text, image_url, input_audio, audio_url, video_url \\(got 'image'\\)",
        ),
        ({"messages": [{"role": "user", "content": [{"type": []}]}]}, "messages[0].content[0].type", "one of text"),
        ({"temperature": "hot"}, "temperature", '"hot" should be a valid number'),
        ({"temperature": "h" * 100_000}, "temperature", f': "{"h" * 79}... should be'),
        ({"temperature": [1]}, "temperature", ": a list should be"),
        ({"audio": 1}, "audio", ": 1 should be"),
        ({"user": {}}, "user", ": an object should be"),
        ({"logit_bias": {"5": "a"}}, "logit_bias.5", '"a" should be a valid number'),
        ({"seed": 1.5}, "seed", "valid integer"),
        ({"stream": "yes"}, "stream", "valid boolean"),
        ({"stream_options": {"shout": True}}, "stream_options.shout", "Unknown parameter"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(extra: dict[str, Any], param: str, what: str) -> None:
    refusal = refused(**extra)
    assert refusal.param == param
    assert re.search(what, refusal.message)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"", "The body is not JSON: EOF"),
        (b"{", "The body is not JSON: EOF"),
        (b"[]", "The body is JSON, but no object"),
        (b'{"model": "m"}', "Missing required parameter: 'messages'"),
        (b"\xff", "The body is not JSON: "),
    ],
)
def test_a_body_that_is_no_request_is_refused(body: bytes, what: str) -> None:
    with pytest.raises(GatewayError, match=what) as caught:
        parse(ChatRequest, body)
    assert caught.value.status == 400


def test_a_refusal_does_not_repeat_what_was_sent() -> None:
    secret = "s3cret" * 1000
    refusal = refused(messages=[{"role": "user", "content": secret, "name": 5}])
    assert "s3cret" not in refusal.message
    assert len(refused(**{"k" * 100_000: 1}).message) < 300


def test_a_spoken_reply_is_named_by_its_id_or_sent_with_its_transcript() -> None:
    by_id = {"role": "assistant", "audio": {"id": "audio_1"}}
    whole = {"role": "assistant", "content": None, "audio": {"id": "gone", "transcript": "Bye."}}
    messages = asked(messages=[*USER, by_id, *USER, whole, *USER]).messages or ()
    assert [message["content"] for message in messages] == ["hi", "Hello.", "hi", "Bye.", "hi"]


@pytest.mark.parametrize("audio", [{"id": 5}, {"id": ["audio_1"]}, {"id": "gone", "transcript": 5}, {}])
def test_an_earlier_reply_that_names_nothing_is_refused(audio: dict[str, Any]) -> None:
    assert refused(messages=[{"role": "assistant", "audio": audio}]).param == "messages[0].audio.id"


def test_speech_options_go_on() -> None:
    body = {"model": "m", "input": "Hi {input}", "voice": "Ethan", "seed": 1, "talker": {"top_k": 1}, "timeout": 5}
    request = speech_request(parse(SpeechRequest, json.dumps(body).encode()), SPEECH_PROMPT, "req_1")
    assert request.text == SPEECH_PROMPT.replace("{input}", "Hi {input}")
    assert (request.voice, request.seed, request.timeout) == ("Ethan", 1, 5)
    assert request.talker == {"top_k": 1}


def test_transcripts_are_forgotten_in_time_and_beyond_their_number() -> None:
    now = [100.0]
    kept = Transcripts(limit=2, seconds=10, clock=lambda: now[0])
    ids = [kept.new_id() for _ in range(3)]
    assert len({audio_id for audio_id, _ in ids}) == 3
    assert {expires_at for _, expires_at in ids} == {110}
    for number, (audio_id, expires_at) in enumerate(ids):
        kept.keep(audio_id, expires_at, str(number))
    assert [kept.find(audio_id) for audio_id, _ in ids] == [None, "1", "2"]
    now[0] = 110.0
    assert [kept.find(audio_id) for audio_id, _ in ids] == [None, None, None]


def test_a_reply_that_took_long_is_forgotten_when_it_said_so() -> None:
    now = [100.0]
    kept = Transcripts(limit=9, seconds=10, clock=lambda: now[0])
    slow, expires_at = kept.new_id()
    now[0] = 105.0
    kept.keep(*kept.new_id(), "ended sooner")
    kept.keep(slow, expires_at, "began sooner")
    assert kept.find(slow) == "began sooner"
    now[0] = 110.0
    assert kept.find(slow) is None
