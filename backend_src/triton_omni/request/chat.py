# SPDX-License-Identifier: Apache-2.0
"""The chat of a request, OpenAI style: messages, their parts, and which encoded medium goes where.

Knows neither the tokenizer nor what is inside a medium.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from triton_omni.core.errors import BadRequest, TooLarge
from triton_omni.core.settings import RequestLimits
from triton_omni.request.strict_json import StrictModel, decode_utf8, parse_json, shown, validate
from triton_omni.request.tools import check_name
from triton_omni.session.engine import MAX_CALLS

MediaKind = Literal["image", "audio", "video"]
Role = Literal["system", "user", "assistant", "tool"]

_MAY_BE_EMPTY = ("assistant", "tool")
"""Roles whose messages may say nothing: replies and results are sent back as they came."""
MAX_URL_HEADER = 1024
"""Characters of a data URI before its data."""


@dataclass(frozen=True)
class TextPart:
    """Text of a message, without unpaired surrogates."""

    text: str


@dataclass(frozen=True)
class MediaPart:
    """One encoded medium; `data` is not looked into yet."""

    kind: MediaKind
    data: bytes = field(repr=False)


Part = TextPart | MediaPart


@dataclass(frozen=True)
class Call:
    """A function that an earlier reply called."""

    name: str
    arguments: dict[str, Any] | str
    """Text if they are no object, for example because a limit cut that reply off."""


@dataclass(frozen=True)
class Message:
    """One turn of the chat."""

    role: Role
    parts: tuple[Part, ...]
    calls: tuple[Call, ...] = ()
    """The assistant's calls, after its text."""


class _Text(StrictModel):
    type: Literal["text"]
    text: str


class _ImageUrl(StrictModel):
    url: str
    detail: Literal["auto"] = "auto"


class _Url(StrictModel):
    url: str


class _InputAudio(StrictModel):
    data: str
    format: Literal["wav", "mp3", "flac", "ogg", "opus", "aac", "m4a", "mp4", "webm", "amr"]
    """Accepted as in OpenAI's API and ignored: the bytes decide the format."""


class _ImagePart(StrictModel):
    type: Literal["image_url"]
    image_url: _ImageUrl


class _InputAudioPart(StrictModel):
    type: Literal["input_audio"]
    input_audio: _InputAudio


class _AudioPart(StrictModel):
    type: Literal["audio_url"]
    audio_url: _Url


class _VideoPart(StrictModel):
    type: Literal["video_url"]
    video_url: _Url


class _NextMedium(StrictModel):
    type: MediaKind


_PART_SCHEMAS: Mapping[str, type[StrictModel]] = {
    "text": _Text,
    "image_url": _ImagePart,
    "input_audio": _InputAudioPart,
    "audio_url": _AudioPart,
    "video_url": _VideoPart,
    "image": _NextMedium,
    "audio": _NextMedium,
    "video": _NextMedium,
}


class _CalledFunction(StrictModel):
    name: str
    arguments: str
    parsed_arguments: object = None
    """What OpenAI's client makes of the arguments; of no effect."""


class _ToolCall(StrictModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _CalledFunction
    index: int | None = None
    """Its place in the stream that it came in; of no effect."""


class _Turn(StrictModel):
    role: Role
    content: object = None
    tool_calls: Annotated[list[_ToolCall], Field(max_length=MAX_CALLS)] = Field(default_factory=list)
    tool_call_id: str | None = None
    """The call that a tool's result belongs to; the model reads results in the order of their calls."""


def chat_of_text(raw: bytes, media: Sequence[bytes], limits: RequestLimits) -> tuple[Message, ...]:
    """Return the chat of a `text_input`: one message of the user.

    Raises:
        BadRequest: empty, not UTF-8, or given together with media.
        TooLarge: over `limits.max_request_bytes`.
    """
    if media:
        raise BadRequest("media: text_input has no place for media; use messages, whose parts say where each one goes")
    if len(raw) > limits.max_request_bytes:
        raise TooLarge(f"text_input: {len(raw)} bytes, the limit is {limits.max_request_bytes}")
    if not raw:
        raise BadRequest("text_input: is empty")
    return (Message("user", (TextPart(decode_utf8(raw, "text_input")),)),)


def parse_messages(raw: bytes, media: Sequence[bytes], limits: RequestLimits) -> tuple[Message, ...]:
    """Return the chat of `messages`, whose parts without data take the elements of `media` in order.

    Raises:
        BadRequest: a value is wrong; the message names the key path, the value and what is allowed.
        TooLarge: a limit is exceeded.
    """
    if len(media) > limits.max_media_items:
        raise TooLarge(f"media: {len(media)} elements, the limit is {limits.max_media_items}")
    base64_bytes = limits.max_media_items * _base64_length(limits.max_media_bytes)
    tree = parse_json(raw, "messages", max_bytes=limits.max_request_bytes, max_media_bytes=base64_bytes)
    if not isinstance(tree, list) or not tree:
        raise BadRequest(f"messages: must be an array of at least one message (got {shown(tree)})")
    if len(tree) > limits.max_messages:
        raise TooLarge(f"messages: {len(tree)} messages, the limit is {limits.max_messages}")
    return _ChatParser(media, limits).parse(tree)


class _ChatParser:
    """Reads parsed messages one after another, handing out the elements of `media` in order."""

    def __init__(self, media: Sequence[bytes], limits: RequestLimits) -> None:
        self._media = media
        self._limits = limits
        self._media_used = 0
        self._media_seen = 0
        self._text_bytes = 0

    def parse(self, tree: list[object]) -> tuple[Message, ...]:
        chat = tuple(self._message(item, index) for index, item in enumerate(tree))
        self._check_whole(chat)
        return chat

    def _check_whole(self, chat: tuple[Message, ...]) -> None:
        last = chat[-1]
        says_something = any(isinstance(part, MediaPart) or part.text for part in last.parts)
        if last.role not in _MAY_BE_EMPTY and not says_something:
            raise BadRequest(f"messages[{len(chat) - 1}].content: is empty")
        if self._media_used != len(self._media):
            raise BadRequest(
                f"media: {len(self._media)} elements are given but messages take {self._media_used}; "
                'every element needs a part {"type": "image" | "audio" | "video"}'
            )

    def _message(self, item: object, index: int) -> Message:
        path = f"messages[{index}]"
        turn = validate(_Turn, item, path)
        calls = _calls(turn, path)
        content = "" if turn.role in _MAY_BE_EMPTY and turn.content in (None, []) else turn.content
        if isinstance(content, str):
            return Message(turn.role, (self._text(content),), calls)
        if not isinstance(content, list) or not content:
            raise BadRequest(f"{path}.content: must be a string or an array of parts (got {shown(content)})")
        parts = tuple(self._part(part, f"{path}.content[{place}]") for place, part in enumerate(content))
        if turn.role != "user" and any(isinstance(part, MediaPart) for part in parts):
            raise BadRequest(f"{path}.content: media are allowed only in messages of the role user (got {turn.role})")
        return Message(turn.role, parts, calls)

    def _part(self, item: object, path: str) -> Part:
        if not isinstance(item, dict):
            raise BadRequest(f"{path}: must be an object (got {shown(item)})")
        kind = item.get("type")
        schema = _PART_SCHEMAS.get(kind) if isinstance(kind, str) else None
        if schema is None:
            raise BadRequest(f"{path}.type: must be one of {', '.join(_PART_SCHEMAS)} (got {shown(kind)})")
        part = validate(schema, item, path)
        return self._text(part.text) if isinstance(part, _Text) else self._medium(part, path)

    def _text(self, text: str) -> TextPart:
        self._text_bytes += len(text.encode("utf-8"))
        if self._text_bytes > self._limits.max_request_bytes:
            raise TooLarge(
                f"messages: over {self._limits.max_request_bytes} bytes of text, which is this deployment's limit"
            )
        return TextPart(text)

    def _medium(self, part: StrictModel, path: str) -> MediaPart:
        self._media_seen += 1
        if self._media_seen > self._limits.max_media_items:
            raise TooLarge(f"{path}: more than {self._limits.max_media_items} media, the limit of this deployment")
        match part:
            case _ImagePart():
                return MediaPart("image", _from_url(part.image_url.url, f"{path}.image_url.url", self._limits))
            case _AudioPart():
                return MediaPart("audio", _from_url(part.audio_url.url, f"{path}.audio_url.url", self._limits))
            case _VideoPart():
                return MediaPart("video", _from_url(part.video_url.url, f"{path}.video_url.url", self._limits))
            case _InputAudioPart():
                return MediaPart("audio", _decode(part.input_audio.data, f"{path}.input_audio.data", self._limits))
            case _NextMedium():
                return MediaPart(part.type, self._next_element(path))
        raise TypeError(f"no medium in a part of class {type(part).__name__}")

    def _next_element(self, path: str) -> bytes:
        index = self._media_used
        if index >= len(self._media):
            raise BadRequest(f"{path}: takes element {index} of media, but media has {len(self._media)} elements")
        self._media_used += 1
        data = self._media[index]
        if data[:5].lower() == b"data:":
            _check_url_length(len(data), f"media[{index}]", self._limits)
            return _from_url(decode_utf8(data, f"media[{index}]"), f"media[{index}]", self._limits)
        return _checked_length(data, f"media[{index}]", self._limits)


def _calls(turn: _Turn, path: str) -> tuple[Call, ...]:
    if turn.tool_calls and turn.role != "assistant":
        raise BadRequest(f"{path}.tool_calls: only messages of the role assistant call (got {turn.role})")
    if turn.tool_call_id is not None and turn.role != "tool":
        raise BadRequest(f"{path}.tool_call_id: belongs to messages of the role tool (got {turn.role})")
    return tuple(_call(one.function, f"{path}.tool_calls[{at}].function") for at, one in enumerate(turn.tool_calls))


def _call(function: _CalledFunction, path: str) -> Call:
    check_name(function.name, f"{path}.name")
    return Call(function.name, _arguments(function.arguments, f"{path}.arguments"))


def _arguments(text: str, path: str) -> dict[str, Any] | str:
    """Read arguments of an earlier reply; programs send them back unchecked, and OpenAI's API accepts them."""
    raw = text.encode() or b"{}"
    try:
        found = parse_json(raw, path, max_bytes=len(raw))
    except BadRequest:
        return text
    return found if isinstance(found, dict) else text


def _base64_length(size: int) -> int:
    return (size + 2) // 3 * 4


def _check_url_length(length: int, path: str, limits: RequestLimits) -> None:
    """Refuse a URL longer than any allowed medium, before the text is copied."""
    if length > MAX_URL_HEADER + _base64_length(limits.max_media_bytes):
        raise TooLarge(f"{path}: {length} characters, the limit is {limits.max_media_bytes} bytes decoded")


def _from_url(url: str, path: str, limits: RequestLimits) -> bytes:
    _check_url_length(len(url), path, limits)
    scheme, colon, rest = url.partition(":")
    allowed = ", ".join(limits.allowed_url_schemes)
    if not colon or scheme.lower() != "data" or "data" not in limits.allowed_url_schemes:
        raise BadRequest(
            f"{path}: this deployment fetches and opens nothing; allowed URL schemes: {allowed} (got {shown(url)})"
        )
    header, comma, data = rest.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise BadRequest(f"{path}: a data URI must be data:<type>;base64,<data> (got {shown(url)})")
    return _decode(data, path, limits)


def _decode(data: str, path: str, limits: RequestLimits) -> bytes:
    if len(data) > _base64_length(limits.max_media_bytes):
        raise TooLarge(f"{path}: {len(data)} characters of base64, the limit is {limits.max_media_bytes} bytes decoded")
    try:
        decoded = binascii.a2b_base64(data, strict_mode=True)
    except ValueError as error:  # binascii.Error, or a character outside ASCII
        raise BadRequest(f"{path}: not base64: {error}") from error
    return _checked_length(decoded, path, limits)


def _checked_length(data: bytes, path: str, limits: RequestLimits) -> bytes:
    if not data:
        raise BadRequest(f"{path}: is empty")
    if len(data) > limits.max_media_bytes:
        raise TooLarge(f"{path}: {len(data)} bytes, the limit is {limits.max_media_bytes}")
    return data
