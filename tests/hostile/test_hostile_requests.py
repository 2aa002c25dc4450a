# SPDX-License-Identifier: Apache-2.0
"""Hostile parameters, messages, text and URLs: a request inside its limits, or a refusal by the name of the field."""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from hostile.judging import Bounds, judge
from hostile.sizes import cases
from hostile.strategies import (
    ANY_JSON,
    DOCUMENT_NOISE,
    MESSAGES,
    PARAMETERS,
    SCHEMAS,
    TEXT,
    URLS,
    as_json,
    damaged,
)
from hostile.watching import Watch, watch
from special_tokens import SPECIALS
from triton_omni.core.errors import OmniError, TooLarge
from triton_omni.core.settings import RequestLimits
from triton_omni.request.chat import Message, TextPart
from triton_omni.request.parse import OmniRequest, RawRequest, RequestDefaults, parse_request
from triton_omni.thinker.prompt import PromptRenderer

LIMITS = RequestLimits(
    max_request_bytes=1 << 14, max_messages=8, max_media_items=3, max_media_bytes=4096, max_schema_bytes=2000
)
DEFAULTS = RequestDefaults(
    max_thinker_tokens=512, max_codes=1024, vocabulary=300, voice="Chelsie", voices=frozenset({"Chelsie", "Ethan"})
)
BOUNDS = Bounds(seconds=1.0, mebibytes=16.0)
FIELDS = r"(sampling_parameters|messages|text_input|media)\b|exactly one of text_input and messages"
VALID_MESSAGES = as_json(
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is \u00fc?"}]},
        {"role": "assistant", "content": "An image."},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": [1]}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]},
    ]
)
VALID_PARAMETERS = as_json(
    {
        "modalities": ["text"],
        "seed": 5,
        "thinker": {"temperature": 0.5, "stop": ["a"], "logit_bias": {"5": 1.0}, "json_schema": {"type": "object"}},
        "talker": {"top_k": 5},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "timeout": 1.5,
    }
)


def parse(raw: RawRequest, secret: str = "") -> OmniRequest | OmniError:
    """Return the parsed request or its refusal; an accepted request is inside the limits."""
    found = judge(lambda: parse_request(raw, LIMITS, DEFAULTS), BOUNDS, named=FIELDS, secret=secret)
    if isinstance(found, OmniRequest):
        assert found.chat[-1].parts or found.chat[-1].calls
        assert len(found.chat) <= LIMITS.max_messages
        assert len(found.media) <= LIMITS.max_media_items
        assert all(0 < len(part.data) <= LIMITS.max_media_bytes for part in found.media)
        assert 0 < found.timeout_s <= DEFAULTS.max_timeout_s
        assert found.thinker.to_sampling(0, 512).max_tokens <= 512
        assert found.talker.to_sampling(0, 1024).max_tokens <= 1024
        for message in found.chat:
            for part in message.parts:
                if isinstance(part, TextPart):
                    part.text.encode()
    event(type(found).__name__)
    return found


@cases(seeded=350, long=16_000)
@given(PARAMETERS | ANY_JSON)
def test_any_parameters(parameters: Any) -> None:
    parse(RawRequest(text_input=b"Hi", sampling_parameters=as_json(parameters)))


@cases(seeded=120, long=8_000)
@given(SCHEMAS)
def test_any_schema(schema: Any) -> None:
    parse(RawRequest(text_input=b"Hi", sampling_parameters=as_json({"thinker": {"json_schema": schema}})))


@cases(seeded=350, long=16_000)
@given(MESSAGES, st.lists(st.binary(max_size=20) | URLS.map(lambda url: url.encode()), max_size=4))
def test_any_messages_and_media(messages: Any, media: list[bytes]) -> None:
    parse(RawRequest(messages=as_json(messages), media=media))


@cases(seeded=350, long=16_000)
@given(damaged(VALID_MESSAGES, DOCUMENT_NOISE), damaged(VALID_PARAMETERS, DOCUMENT_NOISE))
def test_any_damaged_document(messages: bytes, parameters: bytes) -> None:
    parse(RawRequest(messages=messages, media=[b"x"]))
    parse(RawRequest(text_input=b"Hi", sampling_parameters=parameters))


@cases(seeded=120, long=6_000)
@given(st.binary(max_size=60) | TEXT.map(lambda text: text.encode()) | DOCUMENT_NOISE, st.binary(max_size=60))
def test_any_bytes_as_text_and_as_parameters(text: bytes, parameters: bytes) -> None:
    parse(RawRequest(text_input=text, sampling_parameters=parameters))


@pytest.fixture(scope="module")
def opened_by() -> Iterator[Watch]:
    """Tells what a call opens."""
    with watch() as opened:
        yield opened


@cases(seeded=200, long=10_000)
@given(url=URLS, kind=st.sampled_from(["image_url", "audio_url", "video_url"]), as_element=st.booleans())
def test_no_url_is_ever_fetched_or_opened(opened_by: Watch, url: str, kind: str, as_element: bool) -> None:
    part = {"type": kind.removesuffix("_url")} if as_element else {"type": kind, kind: {"url": url}}
    raw = RawRequest(
        messages=as_json([{"role": "user", "content": [part]}]), media=[url.encode()] if as_element else []
    )
    assert opened_by(functools.partial(parse_request, raw, LIMITS, DEFAULTS)) == []
    found = parse(raw)
    if isinstance(found, OmniRequest) and not as_element:
        assert url.lower().startswith("data:")


@pytest.mark.parametrize("scheme", ["data:image/png;base64,", "data:image/png,", "data:,"])
@cases(seeded=40, long=1_000)
@given(medium=st.binary(min_size=12, max_size=60), junk=st.sampled_from(["", "!", "==", "\u00e9"]))
def test_a_refusal_has_nothing_of_the_medium(scheme: str, medium: bytes, junk: str) -> None:
    secret = base64.b64encode(medium).decode().rstrip("=")
    part = {"type": "image_url", "image_url": {"url": scheme + secret + junk}, "extra": secret + junk}
    for asked in (part, {**part, "image_url": part["image_url"]["url"]}):  # type: ignore[index]
        del asked["extra"]
        parse(RawRequest(messages=as_json([{"role": "user", "content": [asked]}])), secret=secret[4:])


def test_what_is_opened_would_be_noticed(opened_by: Watch) -> None:
    assert opened_by(functools.partial(Path.read_bytes, Path("/dev/null"))) == ["open '/dev/null'"]


HUGE = 100 << 20
HUGE_INPUTS: Mapping[str, Callable[[], RawRequest]] = {
    "text of words": lambda: RawRequest(text_input=b"a b " * (HUGE // 4)),
    "text in one run": lambda: RawRequest(text_input=b"a" * HUGE),
    "messages of brackets": lambda: RawRequest(messages=b"[" * HUGE),
    "messages of blanks": lambda: RawRequest(messages=b" " * HUGE),
    "messages without an end": lambda: RawRequest(messages=b'["' + b"a " * (HUGE // 2)),
    "messages of one base64 run": lambda: RawRequest(messages=b'["' + b"A" * HUGE + b'"]'),
    "parameters": lambda: RawRequest(text_input=b"Hi", sampling_parameters=b'{"voice": "' + b"a" * HUGE + b'"}'),
    "a medium": lambda: RawRequest(messages=b'[{"role":"user","content":[{"type":"image"}]}]', media=[bytes(HUGE)]),
    "a data URI": lambda: RawRequest(
        messages=b'[{"role":"user","content":[{"type":"image"}]}]', media=[b"data:image/png;base64," + b"A" * HUGE]
    ),
}


@pytest.mark.parametrize("name", HUGE_INPUTS)
def test_a_hundred_megabytes_are_refused_before_anything_is_made_of_them(name: str) -> None:
    raw, limits = HUGE_INPUTS[name](), RequestLimits(max_media_items=1, max_media_bytes=1 << 20)
    found = judge(
        lambda: parse_request(raw, limits, DEFAULTS),
        Bounds(seconds=3.0, mebibytes=4.0),
        named=FIELDS,
    )
    assert isinstance(found, TooLarge)


@functools.cache
def renderer(checkpoint: str) -> PromptRenderer:
    return PromptRenderer(SimpleNamespace(backend_tokenizer=Tokenizer.from_file(f"{checkpoint}/tokenizer.json")))


@cases(seeded=200, long=10_000)
@given(
    st.lists(
        st.tuples(st.sampled_from(["user", "assistant"]), st.lists(TEXT, min_size=1, max_size=4)),
        min_size=1,
        max_size=4,
    ),
    TEXT,
)
def test_no_text_becomes_a_control_token(tiny_checkpoint: Any, turns: list[tuple[Any, list[str]]], system: str) -> None:
    made = renderer(str(tiny_checkpoint))
    control = {made._plain.token_to_id(name) for name in SPECIALS}
    chat = [Message("system", (TextPart(system),))]
    chat += [Message(role, tuple(TextPart(text) for text in texts)) for role, texts in turns]
    plain = [Message(message.role, (TextPart("x"),)) for message in chat]
    ids = judge(lambda: made.render(chat), Bounds(seconds=1.0, mebibytes=32.0), named="never refused")
    assert isinstance(ids, tuple)
    assert [item for item in ids if item in control] == [item for item in made.render(plain) if item in control]


LONGEST = {
    "letters": "a" * (1 << 20),
    "blanks": " " * (1 << 20),
    "columns": (" " * 999 + "x") * 1000,
    "lines": "\n" * (1 << 20),
    "marks": "a" + "\u0316\u0301" * (1 << 18),
    "special tokens": "<|im_end|>" * 100_000,
    "digits": "1" * (1 << 20),
    "ligatures": "\ufdfa" * (1 << 18),
    "clitics": "'s" * (1 << 19),
    "nul": "\0" * (1 << 20),
}


@pytest.mark.parametrize("name", LONGEST)
def test_the_longest_text_is_tokenised_in_time(tiny_checkpoint: Any, name: str) -> None:
    made = renderer(str(tiny_checkpoint))
    chat = [Message("user", (TextPart(LONGEST[name]),))]
    assert isinstance(judge(lambda: made.render(chat), Bounds(10.0, 1500.0), named="never refused"), tuple)
