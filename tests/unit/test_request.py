# SPDX-License-Identifier: Apache-2.0
"""Contents of a request: the allowed ones are taken, all others are refused by name."""

from __future__ import annotations

import base64
import json
import time
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from triton_omni.core.errors import BadRequest, OmniError, TooLarge
from triton_omni.core.settings import RequestLimits
from triton_omni.request import strict_json
from triton_omni.request.chat import MAX_URL_HEADER, MediaPart, Message, TextPart
from triton_omni.request.parse import RawRequest, RequestDefaults, parse_request
from triton_omni.request.strict_json import MAX_DEPTH, parse_json, shown

LIMITS = RequestLimits(
    max_request_bytes=4096,
    max_messages=8,
    max_media_items=3,
    max_media_bytes=4096,
    max_logit_bias=3,
    max_stop_strings=2,
    max_stop_characters=5,
    max_schema_bytes=60,
)
DEFAULTS = RequestDefaults(
    timeout_s=60.0,
    max_timeout_s=100.0,
    max_thinker_tokens=512,
    max_codes=1024,
    vocabulary=300,
    voice="Chelsie",
    voices=frozenset({"Chelsie", "Ethan"}),
)


def parse(raw, limits=LIMITS, defaults=DEFAULTS):
    return parse_request(raw, limits, defaults)


def with_parameters(parameters):
    text = parameters if isinstance(parameters, str) else json.dumps(parameters)
    return parse(RawRequest(text_input=b"Hi", sampling_parameters=text.encode()))


def with_messages(messages, media=(), limits=LIMITS):
    text = messages if isinstance(messages, str) else json.dumps(messages)
    return parse(RawRequest(messages=text.encode(), media=media), limits)


def user(content):
    return [{"role": "user", "content": content}]


def data_uri(data=b"bytes", kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def test_text_input_is_one_message_of_the_user():
    request = parse(RawRequest(text_input="Grüß dich".encode(), request_id="r1"))
    assert request.chat == (Message("user", (TextPart("Grüß dich"),)),)
    assert request.request_id == "r1"


def test_defaults_are_those_of_the_reference_and_of_the_deployment():
    request = parse(RawRequest(text_input=b"Hi"))
    assert request.modalities == ("text", "audio")
    assert request.wants_audio
    assert (request.voice, request.seed, request.audio_format) == ("Chelsie", None, "f32")
    assert (request.timeout_s, request.priority, request.cache_salt) == (60.0, 0, None)
    assert (request.prefill_only, request.audio_in_pieces) == (False, False)
    assert request.thinker.temperature == 0.0
    talker = request.talker
    assert (talker.temperature, talker.top_p, talker.top_k, talker.repetition_penalty) == (0.9, 0.8, 40, 1.05)
    assert request.token2wav.model_dump() == dict.fromkeys(
        ("preset", "solver", "num_steps", "guidance_scale", "mode", "max_lead_s")
    )


@pytest.mark.parametrize("empty", [b"", b"null", b"{}"])
def test_an_empty_sampling_parameters_input_is_as_none(empty):
    assert parse(RawRequest(text_input=b"Hi", sampling_parameters=empty)) == parse(RawRequest(text_input=b"Hi"))


@pytest.mark.parametrize(
    ("parameters", "salt"),
    [
        ({}, None),
        ({"cache": True}, None),
        ({"cache_salt": "a caller's"}, "a caller's"),
        ({"cache_salt": "a caller's", "cache": False}, None),
    ],
)
def test_a_prompt_is_cached_for_its_salt_alone_and_never_against_its_will(parameters, salt):
    request = with_parameters(parameters)
    assert request.cache_salt == salt
    assert "caller's" not in repr(request)


@pytest.mark.parametrize("others", [{}, {"cache_salt": "a caller's", "cache": False}, {"cache": True}], ids=str)
def test_a_prompt_that_nobody_could_find_is_not_prefilled(others):
    assert with_parameters({"cache_salt": "a caller's", "prefill_only": True}).prefill_only
    with pytest.raises(BadRequest, match=r"sampling_parameters\.prefill_only: .* add cache_salt, .* cache at true"):
        with_parameters({"prefill_only": True} | others)


def test_every_parameter_arrives():
    request = with_parameters(
        {
            "modalities": ["audio", "text"],
            "voice": "Ethan",
            "seed": 2**63 - 1,
            "audio_format": "wav",
            "use_audio_in_video": True,
            "mm_processor_kwargs": {"fps": 0.5, "max_frames": 64, "max_pixels": 401408},
            "thinker": {"temperature": 1, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "max_tokens": 512},
            "talker": {"temperature": 0, "repetition_penalty": 1, "max_tokens": 1024},
            "token2wav": {"solver": "euler", "num_steps": 4, "guidance_scale": 0, "mode": "offline"},
            "timeout": 2.5,
            "priority": -100,
        }
    )
    assert request.priority == -100
    assert request.modalities == ("text", "audio")
    assert (request.voice, request.seed, request.audio_format) == ("Ethan", 2**63 - 1, "wav")
    assert request.use_audio_in_video is True
    chosen = request.mm_processor_kwargs
    assert (chosen.fps, chosen.max_frames, chosen.max_pixels) == (0.5, 64, 401408)
    assert request.timeout_s == 2.5
    assert (request.token2wav.solver, request.token2wav.mode) == ("euler", "offline")


def test_options_become_the_engines_sampling():
    request = with_parameters({"thinker": {"temperature": 0.5, "top_k": 9, "min_p": 0.2, "max_tokens": 100}})
    thinker = request.thinker.to_sampling(seed=5, limit=50)
    assert (thinker.temperature, thinker.top_k, thinker.min_p, thinker.max_tokens, thinker.seed) == (0.5, 9, 0.2, 50, 5)
    assert request.thinker.to_sampling(seed=5, limit=500).max_tokens == 100
    talker = request.talker.to_sampling(seed=6, limit=77)
    assert (talker.top_k, talker.top_p, talker.min_p, talker.max_tokens, talker.seed) == (40, 0.8, 0.0, 77, 6)


def test_least_lengths_may_equal_the_longest_and_reach_the_engines():
    request = with_parameters({"thinker": {"min_tokens": 8, "max_tokens": 8}, "talker": {"min_tokens": 1024}})
    thinker, talker = request.thinker.to_sampling(seed=5, limit=512), request.talker.to_sampling(seed=5, limit=1024)
    assert (thinker.min_tokens, thinker.max_tokens) == (8, 8)
    assert (talker.min_tokens, talker.max_tokens) == (1024, 1024)
    plain = with_parameters({})
    assert (plain.thinker.min_tokens, plain.talker.min_tokens) == (0, 0)


def test_penalties_and_biases_reach_the_thinker_and_min_p_the_talker():
    asked = {"presence_penalty": -2, "frequency_penalty": 0.5, "logit_bias": {"0": -100, "299": 1.5}}
    request = with_parameters({"thinker": asked, "talker": {"min_p": 0.25}})
    thinker = request.thinker.to_sampling(seed=5, limit=512)
    assert (thinker.presence_penalty, thinker.frequency_penalty) == (-2, 0.5)
    assert thinker.logit_bias == ((0, -100), (299, 1.5))
    assert request.talker.to_sampling(seed=5, limit=512).min_p == 0.25


def test_a_schema_reaches_the_thinker_as_json_in_the_clients_order():
    schema = {"type": "object", "properties": {"b": {"enum": ["ж"]}, "a": {}}}
    request = with_parameters({"thinker": {"json_schema": schema}})
    asked = request.thinker.to_sampling(seed=5, limit=512).json_schema
    assert asked == '{"type":"object","properties":{"b":{"enum":["ж"]},"a":{}}}'
    assert with_parameters({}).thinker.to_sampling(seed=5, limit=512).json_schema is None


@pytest.mark.parametrize(
    ("number", "said"),
    [
        ("1e999", "a number must be finite and below 1e309"),
        ("9" * 309, "309 digits, the limit is 308; larger numbers can be given as strings"),
        ("-" + "9" * 400, "400 digits, the limit is 308"),
        ("9" * 4000, "4000 digits, the limit is 308"),
    ],
    ids=["exponent", "309", "400", "4000"],
)
@pytest.mark.parametrize("key", ["maximum", "const", "default"])
def test_a_schema_s_number_that_no_compiler_reads_is_refused_by_its_key(key, number, said):
    with pytest.raises(BadRequest, match=rf"thinker\.json_schema\.{key}: {said}"):
        with_parameters(f'{{"thinker": {{"json_schema": {{"{key}": {number}}}}}}}')


@pytest.mark.parametrize("root", ["true", "7", '"object"', "[]"])
def test_a_schema_whose_root_is_no_object_is_refused(root):
    with pytest.raises(BadRequest, match=r"thinker\.json_schema: must be an object \(got "):
        with_parameters(f'{{"thinker": {{"json_schema": {root}}}}}')


def test_stop_strings_reach_the_thinker_as_they_are():
    request = with_parameters({"thinker": {"stop": ["\n\n", "ж😀"]}})
    assert request.thinker.to_sampling(seed=5, limit=512).stop == ("\n\n", "ж😀")
    assert with_parameters({}).thinker.to_sampling(seed=5, limit=512).stop == ()


def test_token2wav_options_become_the_engines():
    options = with_parameters({"token2wav": {"solver": "euler", "num_steps": 4}}).token2wav.to_stream_options()
    assert (options.solver, options.num_steps, options.guidance_scale, options.mode) == ("euler", 4, None, None)


def test_text_only_wants_no_audio():
    assert not with_parameters({"modalities": ["text"]}).wants_audio


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"bogus": 1}, r"sampling_parameters\.bogus: unknown key"),
        ({"thinker": {"bogus": 1}}, r"sampling_parameters\.thinker\.bogus: unknown key"),
        ({"seed": True}, r"seed: must be an integer \(got true\)"),
        ({"seed": 1.0}, r"seed: must be an integer \(got 1\.0\)"),
        ({"seed": "1"}, r"seed: must be an integer \(got '1'\)"),
        ({"seed": -1}, r"seed: must be at least 0 \(got -1\)"),
        ({"seed": 2**63}, r"seed: .*9223372036854775807"),
        ({"thinker": {"temperature": 2.5}}, r"thinker\.temperature: must be at most 2 \(got 2\.5\)"),
        ({"thinker": {"temperature": False}}, r"thinker\.temperature: must be a number \(got false\)"),
        ({"thinker": {"top_p": 0}}, r"thinker\.top_p: must be greater than 0"),
        ({"thinker": {"top_k": -1}}, r"thinker\.top_k"),
        ({"thinker": {"top_k": 1.5}}, r"thinker\.top_k"),
        ({"thinker": {"min_p": 2}}, r"thinker\.min_p"),
        ({"thinker": {"repetition_penalty": 0}}, r"thinker\.repetition_penalty"),
        ({"thinker": {"max_tokens": 0}}, r"thinker\.max_tokens"),
        ({"thinker": {"min_tokens": -1}}, r"thinker\.min_tokens"),
        ({"thinker": {"min_tokens": 9, "max_tokens": 8}}, r"thinker\.min_tokens: 9 is over max_tokens, 8"),
        ({"talker": {"min_tokens": 9, "max_tokens": 8}}, r"talker\.min_tokens: 9 is over max_tokens, 8"),
        ({"thinker": {"presence_penalty": 2.5}}, r"thinker\.presence_penalty: must be at most 2"),
        ({"thinker": {"frequency_penalty": -3}}, r"thinker\.frequency_penalty: must be at least -2"),
        ({"thinker": {"frequency_penalty": True}}, r"thinker\.frequency_penalty: must be a number \(got true\)"),
        ({"thinker": {"logit_bias": []}}, r"thinker\.logit_bias: must be an object \(got an array of 0 elements\)"),
        ({"thinker": {"logit_bias": {"5": 101}}}, r"thinker\.logit_bias\.5: must be at most 100 \(got 101\)"),
        ({"thinker": {"logit_bias": {"5": "a"}}}, r"thinker\.logit_bias\.5: must be a number \(got 'a'\)"),
        ({"thinker": {"logit_bias": {"a\n": 1}}}, r"thinker\.logit_bias: 'a\\n' is not a token id in decimal"),
        ({"thinker": {"logit_bias": {"05": 1}}}, r"thinker\.logit_bias: '05' is not a token id in decimal"),
        ({"thinker": {"logit_bias": {"-1": 1}}}, r"thinker\.logit_bias: '-1' is not a token id in decimal"),
        ({"thinker": {"logit_bias": {"\u0665": 1}}}, r"thinker\.logit_bias: .* is not a token id in decimal"),
        ({"thinker": {"logit_bias": {"300": 1}}}, r"logit_bias: token id 300 is not in the vocabulary, 0 to 299"),
        ({"thinker": {"stop": "a"}}, r"thinker\.stop: must be an array \(got 'a'\)"),
        ({"thinker": {"stop": ["a", ""]}}, r"thinker\.stop\[1\]: must have 1 or more characters \(got ''\)"),
        ({"thinker": {"stop": ["a", 5]}}, r"thinker\.stop\[1\]: must be a string \(got 5\)"),
        ({"talker": {"stop": ["a"]}}, r"talker\.stop: unknown key"),
        ({"thinker": {"json_schema": []}}, r"thinker\.json_schema: must be an object \(got an array of 0 elements\)"),
        ({"thinker": {"json_schema": "{}"}}, r"thinker\.json_schema: must be an object \(got '\{\}'\)"),
        ({"thinker": {"json_schema": {}, "min_tokens": 1}}, r"thinker\.min_tokens: must be 0 beside json_schema"),
        ({"talker": {"json_schema": {}}}, r"talker\.json_schema: unknown key"),
        ({"talker": {"min_p": 2}}, r"talker\.min_p"),
        ({"talker": {"presence_penalty": 2.5}}, r"talker\.presence_penalty: must be at most 2"),
        ({"talker": {"frequency_penalty": -3}}, r"talker\.frequency_penalty: must be at least -2"),
        ({"talker": {"logit_bias": {"1": 1}}}, r"talker\.logit_bias: unknown key"),
        ({"token2wav": {"num_steps": 1}}, r"token2wav\.num_steps: must be at least 2"),
        ({"token2wav": {"solver": "heun"}}, r"token2wav\.solver: .*'rk4' or 'euler' \(got 'heun'\)"),
        ({"token2wav": {"guidance_scale": 11}}, r"token2wav\.guidance_scale"),
        ({"modalities": []}, r"modalities: must have 1 or more entries"),
        ({"modalities": ["text"] * 3}, r"modalities: must have at most 2 entries"),
        ({"modalities": ["audio"]}, r'modalities: must be \["text"\] or \["text", "audio"\]'),
        ({"modalities": ["text", "text"]}, r"modalities: must be"),
        ({"modalities": ["text", "smell"]}, r"modalities\[1\]: .*'smell'"),
        ({"voice": "Nobody"}, r"voice: 'Nobody' is not one of: Chelsie, Ethan"),
        ({"voice": ""}, r"voice: must have 1 or more characters"),
        ({"voice": "x" * 65}, r"voice: must have at most 64 characters"),
        ({"audio_format": "mp3"}, r"audio_format: must be 'f32', 'pcm16' or 'wav' \(got 'mp3'\)"),
        ({"use_audio_in_video": 1}, r"use_audio_in_video: must be true or false"),
        ({"mm_processor_kwargs": {"fps": 0}}, r"mm_processor_kwargs\.fps: must be greater than 0 \(got 0\)"),
        ({"mm_processor_kwargs": {"fps": 60.5}}, r"mm_processor_kwargs\.fps: must be at most 60 \(got 60\.5\)"),
        ({"mm_processor_kwargs": {"max_frames": 1}}, r"mm_processor_kwargs\.max_frames: must be at least 2"),
        ({"mm_processor_kwargs": {"max_pixels": 100351}}, r"\.max_pixels: must be at least 100352 \(got 100351\)"),
        ({"mm_processor_kwargs": {"max_pixels": 12845057}}, r"\.max_pixels: must be at most 12845056"),
        ({"mm_processor_kwargs": {"num_frames": 4}}, r"mm_processor_kwargs\.num_frames: "),
        ({"priority": 101}, r"priority: must be at most 100 \(got 101\)"),
        ({"priority": -101}, r"priority: must be at least -100"),
        ({"priority": 1.5}, r"priority: must be an integer"),
        ({"cache_salt": ""}, r"cache_salt: must have 1 or more characters"),
        ({"cache_salt": "x" * 257}, r"cache_salt: must have at most 256 characters"),
        ({"cache_salt": 5}, r"cache_salt: must be a string"),
        ({"cache": "no"}, r"cache: must be true or false"),
        ({"prefill_only": 1}, r"prefill_only: must be true or false"),
        ({"audio_in_pieces": "yes"}, r"audio_in_pieces: must be true or false"),
        ({"timeout": 0}, r"timeout: must be greater than 0"),
        ('{"timeout": 1e999}', r"timeout: must be a finite number \(got inf\)"),
        ([1], r"sampling_parameters: must be an object \(got an array of 1 elements\)"),
    ],
)
def test_a_wrong_parameter_is_refused_by_its_key_path(parameters, message):
    with pytest.raises(BadRequest, match=message):
        with_parameters(parameters)


@pytest.mark.parametrize(
    "parameters",
    [
        {"thinker": {"max_tokens": 512, "min_tokens": 512}},
        {"talker": {"max_tokens": 1024, "min_tokens": 1024}},
        {"thinker": {"logit_bias": {"0": 1, "10": 1, "299": 1}}},
        {"thinker": {"stop": ["a", "bcdef"]}},
        {"thinker": {"json_schema": {"title": "b" * 48}}},
        {"timeout": 100},
        {"mm_processor_kwargs": {"fps": 60, "max_frames": 256, "max_pixels": 100352}},
        {"mm_processor_kwargs": {"max_frames": 2, "max_pixels": 12845056}},
        {"voice": "Ethan"},
    ],
)
def test_a_parameter_may_be_exactly_at_its_limit(parameters):
    with_parameters(parameters)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"thinker": {"max_tokens": 513}}, r"thinker\.max_tokens: 513 .*limit of 512"),
        ({"talker": {"max_tokens": 1025}}, r"talker\.max_tokens: 1025 .*limit of 1024"),
        ({"thinker": {"min_tokens": 513}}, r"thinker\.min_tokens: 513 .*limit of 512"),
        ({"talker": {"min_tokens": 1025}}, r"talker\.min_tokens: 1025 .*limit of 1024"),
        ({"thinker": {"logit_bias": dict.fromkeys("1234", 1)}}, r"thinker\.logit_bias: 4 token ids, the limit is 3"),
        ({"thinker": {"stop": ["a", "b", "c"]}}, r"thinker\.stop: 3 strings, the limit is 2"),
        ({"thinker": {"stop": ["a", "bcdefg"]}}, r"thinker\.stop\[1\]: 6 characters, the limit is 5"),
        ({"thinker": {"json_schema": {"enum": ["ж" * 30]}}}, r"thinker\.json_schema: 73 bytes, the limit is 60"),
        (
            {"thinker": {"json_schema": {"items": [{"maxItems": 4097}]}}},
            r"json_schema\.items\[0\]\.maxItems: 4097 is over",
        ),
        ({"thinker": {"json_schema": {"minProperties": 1e9}}}, r"json_schema\.minProperties: .*over the limit of 4096"),
        ({"mm_processor_kwargs": {"max_frames": 257}}, r"mm_processor_kwargs\.max_frames: 257 .*limit of 256"),
        ({"timeout": 100.5}, r"timeout: 100\.5 .*limit of 100"),
    ],
)
def test_what_the_deployment_does_not_allow_is_too_large(parameters, message):
    with pytest.raises(TooLarge, match=message):
        with_parameters(parameters)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused(number):
    with pytest.raises(BadRequest, match="finite"):
        with_parameters('{"thinker": {"temperature": ' + number + "}}")


def test_an_integer_of_thousands_of_digits_is_refused():
    with pytest.raises(
        BadRequest, match=r"sampling_parameters: an integer has more than 4300 digits; give it as a str"
    ):
        with_parameters('{"seed": ' + "9" * 5000 + "}")


@pytest.mark.parametrize("text", ["", " ", "{", '{"seed": 1,}', "{'seed': 1}", "\ufeff{}", '{"seed": 01}'])
def test_what_is_not_json_is_refused(text):
    with pytest.raises(BadRequest, match="messages: not JSON"):
        with_messages(text)


def test_a_key_given_twice_is_refused():
    with pytest.raises(BadRequest, match="key 'seed' is given twice"):
        with_parameters('{"seed": 1, "seed": 2}')


def test_bytes_that_are_not_utf8_are_refused_with_their_place():
    with pytest.raises(BadRequest, match=r"text_input: byte 2 \(0xff\) is not valid UTF-8"):
        parse(RawRequest(text_input=b"Hi\xff"))
    with pytest.raises(BadRequest, match="messages: byte 2"):
        parse(RawRequest(messages=b'["\xed\xa0\x80"]'))


@pytest.mark.parametrize("escape", ["\\ud800", "\\udc00", "\\udc00\\ud800", "a\\ud83dz"])
def test_unpaired_surrogates_are_refused_by_key_path(escape):
    with pytest.raises(BadRequest, match=r"messages\[0\]\.content: unpaired surrogate U\+D"):
        with_messages('[{"role": "user", "content": "' + escape + '"}]')


def test_paired_surrogates_are_one_character():
    request = with_messages('[{"role": "user", "content": "\\ud83d\\ude00"}]')
    assert request.chat[0].parts == (TextPart("\U0001f600"),)


def test_an_unpaired_surrogate_in_a_key_is_refused():
    with pytest.raises(BadRequest, match="unpaired surrogate"):
        with_parameters('{"\\ud800": 1}')


@pytest.mark.parametrize("bomb", ["[" * 2000, '{"a":' * 600, "[" * 2000 + "]" * 2000])
def test_nesting_bombs_are_refused_before_the_parser_sees_them(bomb):
    with pytest.raises(BadRequest, match=f"nested deeper than {MAX_DEPTH} levels"):
        with_messages(bomb)


def test_brackets_inside_strings_are_no_nesting():
    content = '[[{"\\' * 100
    assert with_messages(user(content)).chat[0].parts == (TextPart(content),)


def test_a_document_over_the_limit_is_refused_before_it_is_parsed():
    with pytest.raises(TooLarge, match=r"messages: \d+ bytes besides base64 media, the limit is 4096"):
        with_messages("[" + '"a b",' * 1000)
    with pytest.raises(TooLarge, match="text_input: 4097 bytes, the limit is 4096"):
        parse(RawRequest(text_input=b"a" * 4097))
    with pytest.raises(TooLarge, match="sampling_parameters: "):
        with_parameters(" " * 300_000)


def test_a_document_may_be_exactly_at_each_limit():
    assert parse_json(b'"ab"', "a", max_bytes=4) == "ab"
    run = "a" * 1024
    assert parse_json(f'"{run}"'.encode(), "a", max_bytes=2, max_media_bytes=1024) == run
    with pytest.raises(TooLarge, match="a: 1027 bytes, the limit is 1026"):
        parse_json(f'"{run}" '.encode(), "a", max_bytes=2, max_media_bytes=1024)
    with pytest.raises(TooLarge, match="a: 1025 bytes of base64, the limit is 1024"):
        parse_json(f'"{run}a"'.encode(), "a", max_bytes=3, max_media_bytes=1024)
    with pytest.raises(TooLarge, match="a: 1025 bytes besides base64 media, the limit is 1000"):
        parse_json(f'"{run[1:]}"'.encode(), "a", max_bytes=1000, max_media_bytes=1024)
    assert parse(RawRequest(text_input=b"a" * 4096)).chat == (Message("user", (TextPart("a" * 4096),)),)


def test_a_document_may_be_nested_as_deep_as_the_limit():
    deepest = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    parse_json(deepest, "a", max_bytes=100)
    parse_json(b"[" + b"[]," * MAX_DEPTH + b"[]]", "a", max_bytes=200)
    with pytest.raises(BadRequest, match=f"a: nested deeper than 32 levels at byte {MAX_DEPTH}"):
        parse_json(b"[" + deepest + b"]", "a", max_bytes=100)
    with pytest.raises(BadRequest, match="a: nested deeper than 32 levels"):
        parse_json(b"[{}," + deepest + b"]", "a", max_bytes=100)


def test_text_that_looks_like_base64_counts_as_text():
    with pytest.raises(TooLarge, match="over 4096 bytes of text"):
        with_messages(user("a" * 5000))


def test_media_do_not_count_as_text():
    image = {"type": "image_url", "image_url": {"url": data_uri(b"\xfb" * 4096)}}
    assert with_messages(user([image])).media[0].data == b"\xfb" * 4096


def test_base64_beyond_all_media_limits_is_refused_before_parsing():
    with pytest.raises(TooLarge, match="bytes of base64"):
        with_messages('["' + "a" * 20000)


def test_escaped_slashes_in_base64_are_understood():
    text = json.dumps(user([{"type": "image_url", "image_url": {"url": data_uri(b"\xff" * 4096)}}]))
    assert with_messages(text.replace("/", "\\/")).media[0].data == b"\xff" * 4096


@pytest.mark.parametrize(
    ("raw", "found"),
    [(RawRequest(), "neither"), (RawRequest(text_input=b"a", messages=b"[]"), "both")],
)
def test_exactly_one_of_text_input_and_messages_is_needed(raw, found):
    with pytest.raises(BadRequest, match=f"exactly one of text_input and messages must be given, found {found}"):
        parse(raw)


def test_text_input_with_media_is_refused_and_says_what_to_do():
    with pytest.raises(BadRequest, match="use messages"):
        parse(RawRequest(text_input=b"Hi", media=[b"x"]))


def test_an_empty_text_input_is_refused():
    with pytest.raises(BadRequest, match="text_input: is empty"):
        parse(RawRequest(text_input=b""))


def test_a_chat_keeps_roles_parts_and_order():
    uri = data_uri(b"abc")
    request = with_messages(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]},
            {"role": "assistant", "content": "b"},
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": uri, "detail": "auto"}},
                    {"type": "video"},
                    {"type": "text", "text": "c"},
                ],
            },
        ],
        media=[b"first", b"second"],
    )
    assert [message.role for message in request.chat] == ["system", "user", "assistant", "user"]
    assert request.chat[1].parts == (TextPart("a"), MediaPart("image", b"first"))
    assert request.chat[3].parts == (MediaPart("image", b"abc"), MediaPart("video", b"second"), TextPart("c"))
    assert [part.kind for part in request.media] == ["image", "image", "video"]


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": data_uri()}}, "image"),
        ({"type": "audio_url", "audio_url": {"url": data_uri(kind="audio/wav")}}, "audio"),
        ({"type": "video_url", "video_url": {"url": data_uri(kind="video/mp4;codecs=avc1")}}, "video"),
        ({"type": "video_url", "video_url": {"url": data_uri(kind="").replace("data", "DATA")}}, "video"),
        ({"type": "input_audio", "input_audio": {"data": "Ynl0ZXM=", "format": "wav"}}, "audio"),
    ],
)
def test_every_kind_of_inline_medium(part, kind):
    assert with_messages(user([part])).media == (MediaPart(kind, b"bytes"),)


def test_an_element_of_media_may_be_a_data_uri():
    request = with_messages(user([{"type": "audio"}]), media=[data_uri(b"abc").encode()])
    assert request.media == (MediaPart("audio", b"abc"),)


@pytest.mark.parametrize("url", ["https://a/b.png", "http://a", "file:///etc/passwd", "/etc/passwd", "ftp://a", ""])
@pytest.mark.parametrize("kind", ["image_url", "audio_url", "video_url"])
def test_nothing_is_fetched_or_opened(kind, url):
    with pytest.raises(BadRequest, match=rf"content\[0\]\.{kind}\.url: .*allowed URL schemes: data \(got"):
        with_messages(user([{"type": kind, kind: {"url": url}}]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"messages\[0\]\.content: must be a string or an array"),
        (5, r"messages\[0\]\.content: must be a string or an array"),
        ([], r"messages\[0\]\.content: must be a string or an array"),
        ("", r"messages\[0\]\.content: is empty"),
        (["text"], r"content\[0\]: must be an object \(got 'text'\)"),
        ([{}], r"content\[0\]\.type: must be one of text, image_url"),
        ([{"type": []}], r"content\[0\]\.type: must be one of"),
        ([{"type": "file"}], r"content\[0\]\.type: must be one of .*got 'file'"),
        ([{"type": "text"}], r"content\[0\]\.text: is required"),
        ([{"type": "text", "text": 5}], r"content\[0\]\.text: must be a string \(got 5\)"),
        ([{"type": "text", "text": "a", "more": 1}], r"content\[0\]\.more: unknown key"),
        ([{"type": "image_url", "image_url": data_uri()}], r"content\[0\]\.image_url: "),
        ([{"type": "image_url", "image_url": {"url": "data:,abc"}}], r"image_url\.url: a data URI must be"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64"}}], r"a data URI must be"),
        ([{"type": "image_url", "image_url": {"url": "data:;base64,a b="}}], r"image_url\.url: not base64"),
        ([{"type": "image_url", "image_url": {"url": "data:;base64,YQ"}}], r"image_url\.url: not base64"),
        ([{"type": "image_url", "image_url": {"url": "data:;base64,é"}}], r"image_url\.url: not base64"),
        ([{"type": "image_url", "image_url": {"url": "data:;base64,"}}], r"image_url\.url: is empty"),
        ([{"type": "image_url", "image_url": {"url": data_uri(), "detail": "low"}}], r"image_url\.detail"),
        ([{"type": "input_audio", "input_audio": {"data": "YQ=="}}], r"input_audio\.format: is required"),
        ([{"type": "input_audio", "input_audio": {"data": "YQ==", "format": "aiff"}}], r"input_audio\.format"),
        ([{"type": "image", "image": "x"}], r"content\[0\]\.image: unknown key"),
        ([{"type": "image"}], r"content\[0\]: takes element 0 of media, but media has 0 elements"),
    ],
)
def test_wrong_content_is_refused_by_its_key_path(content, message):
    with pytest.raises(BadRequest, match=message):
        with_messages(user(content))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ({}, "at least one message"),
        (["a"], r"messages\[0\]: must be an object"),
        ([{"role": "teacher", "content": "a"}], r"messages\[0\]\.role: .*'teacher'"),
        ([{"content": "a"}], r"messages\[0\]\.role: is required"),
        ([{"role": "user", "content": "a", "name": "b"}], r"messages\[0\]\.name: unknown key"),
        ([*user("a"), {"role": "system", "content": ""}], r"messages\[1\]\.content: is empty"),
        ([*user("a"), *user([{"type": "text", "text": ""}])], r"messages\[1\]\.content: is empty"),
        ([{"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": data_uri()}}]}], "only in"),
    ],
)
def test_a_wrong_chat_is_refused(messages, message):
    with pytest.raises(BadRequest, match=message):
        with_messages(messages)


@pytest.mark.parametrize(
    "roles",
    [["system"], ["user", "assistant"], ["system", "user", "system"], ["user", "system", "user"], ["assistant"]],
)
def test_any_role_may_come_anywhere(roles):
    messages = [{"role": role, "content": f"text {place}"} for place, role in enumerate(roles)]
    assert [message.role for message in with_messages(messages).chat] == roles


def test_a_message_before_the_last_may_be_empty():
    assert [message.parts for message in with_messages([*user(""), *user("a")]).chat] == [
        (TextPart(""),),
        (TextPart("a"),),
    ]


def test_media_without_a_part_are_refused():
    with pytest.raises(BadRequest, match="media: 2 elements are given but messages take 1"):
        with_messages(user([{"type": "image"}]), media=[b"a", b"b"])


def test_counts_and_sizes_of_media_are_bounded():
    with pytest.raises(TooLarge, match="media: 4 elements, the limit is 3"):
        with_messages(user([{"type": "image"}] * 4), media=[b"a"] * 4)
    with pytest.raises(TooLarge, match=r"content\[3\]: more than 3 media"):
        with_messages(user([{"type": "image_url", "image_url": {"url": data_uri()}}] * 4))
    with pytest.raises(TooLarge, match=r"media\[0\]: 4097 bytes, the limit is 4096"):
        with_messages(user([{"type": "image"}]), media=[b"a" * 4097])
    with pytest.raises(TooLarge, match=r"image_url\.url: .*limit is 4096 bytes"):
        with_messages(user([{"type": "image_url", "image_url": {"url": data_uri(b"a" * 4099)}}]))
    with pytest.raises(BadRequest, match=r"media\[0\]: is empty"):
        with_messages(user([{"type": "image"}]), media=[b""])


def test_a_chat_may_be_exactly_at_each_limit():
    assert with_messages(user([{"type": "image"}] * 3), media=[b"a"] * 3).media == (MediaPart("image", b"a"),) * 3
    assert with_messages(user([{"type": "image"}]), media=[b"a" * 4096]).media[0].data == b"a" * 4096
    assert len(with_messages(user("a") * 8).chat) == 8
    uri = data_uri(b"a" * 4096, kind=f"image/png;name={'n' * (MAX_URL_HEADER - 28)}")
    assert uri.index(",") + 1 == MAX_URL_HEADER
    for chat in (
        with_messages(user([{"type": "image_url", "image_url": {"url": uri}}])),
        with_messages(user([{"type": "image"}]), media=[uri.encode()]),
    ):
        assert chat.media[0].data == b"a" * 4096
    texts = [{"type": "text", "text": "a" * 2048}] * 2
    assert len(with_messages(user(texts)).chat[0].parts) == 2
    with pytest.raises(TooLarge, match="over 4096 bytes of text"):
        with_messages(user([*texts, {"type": "text", "text": "a"}]))


def test_the_number_of_messages_is_bounded():
    with pytest.raises(TooLarge, match="messages: 9 messages, the limit is 8"):
        with_messages(user("a") * 9)


def test_values_in_messages_are_cut_and_escaped():
    with pytest.raises(BadRequest) as caught:
        with_parameters({"voice": "\n\x1b[31m" + "x" * 500})
    assert "\n" not in caught.value.message
    assert "\x1b" not in caught.value.message
    assert len(caught.value.message) < 300
    with pytest.raises(BadRequest) as caught:
        with_parameters({"\n" + "k" * 500: 1})
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 300


def test_keys_in_key_paths_are_escaped():
    with pytest.raises(BadRequest, match="unpaired surrogate") as caught:
        with_parameters('{"\\n": "\\ud800"}')
    assert "\n" not in caught.value.message


def test_a_message_has_few_characters_of_every_key_however_they_are_escaped():
    tree = "\ud800"
    for _ in range(28):
        tree = {"\U0001f600" * 80: tree}
    with pytest.raises(BadRequest, match="unpaired surrogate") as caught:
        with_parameters(tree)
    assert len(caught.value.message) < 28 * 90


def test_a_schema_s_own_key_is_escaped_in_the_message():
    with pytest.raises(BadRequest, match=r"anyOf cannot be combined with '\\n") as caught:
        parse(
            RawRequest(
                text_input=b"Hi",
                sampling_parameters=json.dumps({"thinker": {"json_schema": {"anyOf": [], "\n" * 2000: 1}}}).encode(),
            ),
            limits=RequestLimits(),
        )
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": "data:image/png;base64,c2VjcmV0"},
        {"type": "image_url", "image_url": {"url": "data:image/png,c2VjcmV0"}},
        {"type": "image_url", "image_url": {"url": "DATA:;base32,c2VjcmV0"}},
    ],
)
def test_a_message_about_a_data_uri_has_its_header_and_nothing_of_the_medium(part):
    with pytest.raises(BadRequest, match=r"(?i)got 'data:") as caught:
        with_messages(user([part]))
    assert "c2VjcmV0" not in caught.value.message


def test_what_is_no_object_is_refused_without_a_word_of_our_classes():
    with pytest.raises(BadRequest, match=r"image_url: must be an object \(got 5\)"):
        with_messages(user([{"type": "image_url", "image_url": 5}]))
    with pytest.raises(BadRequest, match=r"thinker: must be an object \(got 5\)"):
        with_parameters({"thinker": 5})


@pytest.mark.parametrize("scheme", ["data:image/png;base64,", "http://", ""])
def test_a_url_too_long_for_any_medium_is_refused_before_it_is_copied(scheme):
    limits = RequestLimits(max_media_bytes=4096)
    raw = json.dumps(user([{"type": "image_url", "image_url": {"url": scheme + "A" * 7000}}])).encode()
    with pytest.raises(TooLarge, match=r"image_url\.url: .*7\d\d\d.*limit is 4096"):
        parse(RawRequest(messages=raw), limits=limits)


def test_a_data_uri_in_media_is_refused_before_it_is_copied():
    raw = json.dumps(user([{"type": "image"}])).encode()
    element = b"data:image/png;base64," + b"A" * (64 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge, match=r"media\[0\]: 67108886 characters, the limit is 4096 bytes"):
            parse(RawRequest(messages=raw, media=[element]))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_media_bytes_do_not_appear_in_representations():
    assert "secret" not in repr(MediaPart("image", b"secret"))


@pytest.mark.parametrize(
    ("value", "expected"), [("a\tb", r"'a\tb'"), (True, "true"), (None, "null"), (1.5, "1.5"), ({"a": 1}, "an object")]
)
def test_shown_values(value, expected):
    assert shown(value).startswith(expected)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["user", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "url", "image_url", "seed", "thinker", "top_k"]), inner
        )
    ),
    max_leaves=12,
)


def parse_or_refuse(raw):
    with suppress(OmniError):
        request = parse(raw)
        assert request.chat[-1].role == "user"


@settings(max_examples=200)
@given(JSON, JSON, st.lists(st.binary(max_size=6), max_size=4))
def test_any_json_is_parsed_or_refused_by_name(messages, parameters, media):
    parse_or_refuse(RawRequest(None, json.dumps(messages).encode(), media, json.dumps(parameters).encode()))


@settings(max_examples=200)
@given(st.binary(max_size=40), st.binary(max_size=40))
@example(b'["\\', b'{"\\')
def test_any_bytes_are_parsed_or_refused_by_name(messages, parameters):
    parse_or_refuse(RawRequest(messages=messages, sampling_parameters=parameters))


@settings(max_examples=200)
@given(st.text(min_size=1, max_size=50).filter(lambda text: all(not 0xD800 <= ord(char) < 0xE000 for char in text)))
def test_any_text_survives_both_forms(text):
    spoken = parse(RawRequest(text_input=text.encode()))
    assert (
        spoken.chat == with_messages(user(text)).chat == with_messages(json.dumps(user(text), ensure_ascii=False)).chat
    )
    assert spoken.chat[0].parts == (TextPart(text),)


@settings(max_examples=100)
@given(
    st.fixed_dictionaries(
        {
            "temperature": st.floats(0, 2),
            "top_p": st.floats(0, 1, exclude_min=True),
            "top_k": st.integers(0, 1 << 20),
            "min_p": st.floats(0, 1),
            "repetition_penalty": st.floats(0.1, 10),
            "max_tokens": st.integers(1, 512),
        }
    ),
    st.integers(0, 2**63 - 1),
)
def test_every_value_in_range_reaches_the_engine_unchanged(options, seed):
    request = with_parameters({"thinker": options, "talker": options, "seed": seed})
    for stage in (request.thinker, request.talker):
        sampling = stage.to_sampling(request.seed, 4096)
        assert {name: getattr(sampling, name) for name in options} == options
        assert sampling.seed == seed


@settings(max_examples=100)
@given(
    st.fixed_dictionaries({"presence_penalty": st.floats(-2, 2), "frequency_penalty": st.floats(-2, 2)}),
    st.dictionaries(st.integers(0, 299), st.floats(-100, 100), max_size=3),
)
def test_every_penalty_and_bias_in_range_reaches_the_thinker_unchanged(penalties, bias):
    asked = penalties | {"logit_bias": {str(token): value for token, value in bias.items()}}
    sampling = with_parameters({"thinker": asked}).thinker.to_sampling(0, 512)
    assert {name: getattr(sampling, name) for name in penalties} == penalties
    assert dict(sampling.logit_bias) == bias


def test_long_input_is_searched_in_a_time_that_grows_with_its_length_alone() -> None:
    quotes, runs = b'"' + b'\\"' * (1 << 20), (b"A" * 1023 + b'"') * 4096
    begun = time.thread_time()
    with pytest.raises(BadRequest, match="name: not JSON"):
        parse_json(quotes, "name", max_bytes=1 << 22)
    with pytest.raises(TooLarge, match="name: 4194304 bytes besides base64 media, the limit is 1000"):
        parse_json(runs, "name", max_bytes=1000, max_media_bytes=1 << 23)
    assert time.thread_time() - begun < 1.5
    with pytest.raises(BadRequest, match="nested deeper"):
        parse_json(b"[" * (MAX_DEPTH + 1) + quotes, "name", max_bytes=1 << 22)
    with pytest.raises(TooLarge, match="name: 4194304 bytes, the limit is 3000"):
        parse_json(runs, "name", max_bytes=1000, max_media_bytes=2000)


@pytest.mark.parametrize(
    ("by_triton_us", "asked", "seconds"),
    [
        (0, None, 120.0),
        (0, 7, 7.0),
        (1_500_000, None, 1.5),
        (1_500_000, 7, 1.5),
        (9_000_000, 7, 7.0),
        (300_000_000, None, 300.0),
    ],
)
def test_the_sooner_of_both_timeouts_holds(by_triton_us, asked, seconds):
    parameters = {} if asked is None else {"timeout": asked}
    raw = RawRequest(text_input=b"hi", sampling_parameters=json.dumps(parameters).encode(), timeout_us=by_triton_us)
    assert parse_request(raw, RequestLimits(), RequestDefaults()).timeout_s == seconds


@pytest.mark.parametrize("by_triton_us", [3_600_000_001, 2**63, 2**64 - 1])
def test_triton_s_timeout_has_the_deployment_s_limit(by_triton_us):
    raw = RawRequest(text_input=b"hi", timeout_us=by_triton_us)
    said = rf"^timeout: {by_triton_us} us \(Triton's parameter\) is over this deployment's limit of 3600000000 us$"
    with pytest.raises(TooLarge, match=said):
        parse_request(raw, RequestLimits(), RequestDefaults())


MANY_KEYS = {f"key {number}": 1 for number in range(65)}


@pytest.mark.parametrize(
    ("parameters", "messages", "path"),
    [
        (MANY_KEYS, None, "sampling_parameters"),
        ({}, [{"role": "user", "content": "hi"} | MANY_KEYS], r"messages\[0\]"),
        (
            {},
            [{"role": "user", "content": [{"type": "text", "text": "hi"} | MANY_KEYS]}],
            r"messages\[0\]\.content\[0\]",
        ),
    ],
    ids=["parameters", "a message", "a part"],
)
def test_unknown_keys_are_counted_before_each_is_described(parameters, messages, path, monkeypatch):
    monkeypatch.setattr(strict_json, "_describe", lambda *_: pytest.fail("described"))
    chat = {"text_input": b"hi"} if messages is None else {"messages": json.dumps(messages).encode()}
    raw = RawRequest(**chat, sampling_parameters=json.dumps(parameters).encode())
    with pytest.raises(TooLarge, match=rf"^{path}: \d\d keys, the limit is 64$"):
        parse_request(raw, RequestLimits(), RequestDefaults())


def test_keys_of_the_client_s_own_are_as_many_as_their_limits_allow():
    schema = {"properties": {f"p{number}": {} for number in range(200)}}
    bias = {str(number): 1.0 for number in range(100)}
    request = parse_request(
        RawRequest(
            b"hi", sampling_parameters=json.dumps({"thinker": {"json_schema": schema, "logit_bias": bias}}).encode()
        ),
        RequestLimits(max_logit_bias=100),
        RequestDefaults(),
    )
    assert len(request.thinker.logit_bias) == 100
