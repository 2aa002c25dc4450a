# SPDX-License-Identifier: Apache-2.0
"""One request as a client sends it: bytes in, a checked and frozen `OmniRequest` out.

Everything is refused by name here, before media are decoded or an engine is asked. This module knows neither the
tokenizer nor what is inside a medium.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from triton_omni.engine import Sampling
from triton_omni.errors import BadRequest, TooLarge
from triton_omni.settings import RequestLimits, Solver
from triton_omni.strict_json import decode_utf8, parse_json, shown

MediaKind = Literal["image", "audio", "video"]
Modality = Literal["text", "audio"]
Role = Literal["system", "user", "assistant"]
AudioFormat = Literal["f32", "pcm16", "wav"]

MAX_SEED = 2**63 - 1
MAX_PARAMETERS_BYTES = 1 << 16


class _Strict(BaseModel):
    """No coercion (a bool is no int), no unknown key, finite numbers only."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=0, le=1 << 20)]
MinP = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=0.1, le=10)]
TokenCount = Annotated[int, Field(ge=1, le=131072)]


class ThinkerOptions(_Strict):
    """How the thinker samples its reply; greedy unless asked otherwise, as HF's `generate` does."""

    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: Penalty = 1.0
    max_tokens: TokenCount | None = None
    """None = what the deployment allows."""

    def to_sampling(self, seed: int, limit: int) -> Sampling:
        """The engine's `Sampling`; at most `limit` tokens, whatever was asked."""
        return _sampling(self.model_dump(), seed, limit)


class TalkerOptions(_Strict):
    """How the talker samples codec codes; the defaults are HF's `talker_*` arguments of `generate`."""

    temperature: Temperature = 0.9
    top_p: TopP = 0.8
    top_k: TopK = 40
    repetition_penalty: Penalty = 1.05
    max_tokens: TokenCount | None = None
    """Codec codes, 50 a second; None = what the deployment allows."""

    def to_sampling(self, seed: int, limit: int) -> Sampling:
        """The engine's `Sampling`; at most `limit` codes, whatever was asked."""
        return _sampling(self.model_dump(), seed, limit)


def _sampling(options: dict[str, Any], seed: int, limit: int) -> Sampling:
    asked = options.pop("max_tokens")
    return Sampling(**options, seed=seed, max_tokens=limit if asked is None else min(asked, limit))


class Token2WavOptions(_Strict):
    """How codes become a waveform; None = what the deployment's `stage.yaml` says."""

    solver: Solver | None = None
    num_steps: Annotated[int, Field(ge=2, le=64)] | None = None
    guidance_scale: Annotated[float, Field(ge=0, le=10)] | None = None
    mode: Literal["streaming", "offline"] | None = None


class _Parameters(_Strict):
    """The schema of `sampling_parameters`."""

    modalities: Annotated[list[Modality], Field(min_length=1, max_length=2)] = Field(default=["text", "audio"])
    voice: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    audio_format: AudioFormat = "f32"
    use_audio_in_video: bool = False
    thinker: ThinkerOptions = ThinkerOptions()
    talker: TalkerOptions = TalkerOptions()
    token2wav: Token2WavOptions = Token2WavOptions()
    timeout: Annotated[float, Field(gt=0)] | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    cancel_token: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,18}\z")] | None = None


class _Text(_Strict):
    type: Literal["text"]
    text: str


class _ImageUrl(_Strict):
    url: str
    detail: Literal["auto"] = "auto"


class _Url(_Strict):
    url: str


class _InputAudio(_Strict):
    data: str
    format: Literal["wav", "mp3", "flac", "ogg"]


class _ImagePart(_Strict):
    type: Literal["image_url"]
    image_url: _ImageUrl


class _InputAudioPart(_Strict):
    type: Literal["input_audio"]
    input_audio: _InputAudio


class _AudioPart(_Strict):
    type: Literal["audio_url"]
    audio_url: _Url


class _VideoPart(_Strict):
    type: Literal["video_url"]
    video_url: _Url


class _NextMedium(_Strict):
    type: MediaKind


_PART_SCHEMAS: Mapping[str, type[_Strict]] = {
    "text": _Text,
    "image_url": _ImagePart,
    "input_audio": _InputAudioPart,
    "audio_url": _AudioPart,
    "video_url": _VideoPart,
    "image": _NextMedium,
    "audio": _NextMedium,
    "video": _NextMedium,
}


class _Turn(_Strict):
    role: Role
    content: Any


@dataclass(frozen=True)
class RawRequest:
    """The inputs of one request as Triton gives them; an absent input is None (`media`: empty)."""

    text_input: bytes | None = None
    messages: bytes | None = None
    media: Sequence[bytes] = ()
    sampling_parameters: bytes | None = None
    request_id: str = ""


@dataclass(frozen=True)
class RequestDefaults:
    """What the deployment fills in or bounds besides `RequestLimits`."""

    timeout_s: float = 120.0
    max_timeout_s: float = 3600.0
    max_thinker_tokens: int = 1024
    max_codes: int = 4096
    voice: str | None = None
    """Speaker of a request that names none; None = the checkpoint's first."""
    voices: frozenset[str] = frozenset()
    """Speakers of the checkpoint; empty = not checked here."""


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
class Message:
    """One turn of the chat."""

    role: Role
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class OmniRequest:
    """A request in which every value is inside its range; the last message is the user's."""

    chat: tuple[Message, ...]
    modalities: tuple[Modality, ...]
    voice: str | None
    seed: int | None
    """None = the deployment draws one and reports it."""
    audio_format: AudioFormat
    use_audio_in_video: bool
    thinker: ThinkerOptions
    talker: TalkerOptions
    token2wav: Token2WavOptions
    timeout_s: float
    priority: int
    cancel_token: int | None
    """Random 63-bit name under which the unary model cancels."""
    request_id: str

    @property
    def wants_audio(self) -> bool:
        """Whether the reply is to be spoken."""
        return "audio" in self.modalities

    @property
    def media(self) -> tuple[MediaPart, ...]:
        """Every medium, in the order of the chat."""
        return tuple(part for message in self.chat for part in message.parts if isinstance(part, MediaPart))


def parse_request(raw: RawRequest, limits: RequestLimits, defaults: RequestDefaults) -> OmniRequest:
    """Check everything a client sent.

    Raises:
        BadRequest: something is wrong in itself; the message names the key path, the value and what is allowed.
        TooLarge: a limit of the deployment is exceeded.
    """
    parameters = _parse_parameters(raw.sampling_parameters, defaults)
    chat = _parse_chat(raw, limits)
    ordered: tuple[Modality, ...] = ("text", "audio") if "audio" in parameters.modalities else ("text",)
    return OmniRequest(
        chat=chat,
        modalities=ordered,
        voice=parameters.voice if parameters.voice is not None else defaults.voice,
        seed=parameters.seed,
        audio_format=parameters.audio_format,
        use_audio_in_video=parameters.use_audio_in_video,
        thinker=parameters.thinker,
        talker=parameters.talker,
        token2wav=parameters.token2wav,
        timeout_s=defaults.timeout_s if parameters.timeout is None else parameters.timeout,
        priority=parameters.priority,
        cancel_token=None if parameters.cancel_token is None else int(parameters.cancel_token),
        request_id=raw.request_id,
    )


def _parse_parameters(raw: bytes | None, defaults: RequestDefaults) -> _Parameters:
    name = "sampling_parameters"
    tree = {} if not raw else parse_json(raw, name, max_bytes=MAX_PARAMETERS_BYTES)
    parameters = _validate(_Parameters, tree, name)
    if "text" not in parameters.modalities or len(set(parameters.modalities)) < len(parameters.modalities):
        raise BadRequest(f'{name}.modalities: must be ["text"] or ["text", "audio"] (got {parameters.modalities})')
    _at_most(parameters.thinker.max_tokens, defaults.max_thinker_tokens, f"{name}.thinker.max_tokens")
    _at_most(parameters.talker.max_tokens, defaults.max_codes, f"{name}.talker.max_tokens")
    _at_most(parameters.timeout, defaults.max_timeout_s, f"{name}.timeout")
    if parameters.cancel_token is not None and int(parameters.cancel_token) > MAX_SEED:
        raise BadRequest(f"{name}.cancel_token: must be below 2**63 (got {parameters.cancel_token})")
    if parameters.voice is not None and defaults.voices and parameters.voice not in defaults.voices:
        known = ", ".join(sorted(defaults.voices))
        raise BadRequest(f"{name}.voice: {shown(parameters.voice)} is not one of: {known}")
    return parameters


def _at_most(value: float | None, limit: float, path: str) -> None:
    if value is not None and value > limit:
        raise TooLarge(f"{path}: {value} is over this deployment's limit of {limit}")


def _parse_chat(raw: RawRequest, limits: RequestLimits) -> tuple[Message, ...]:
    if (raw.text_input is None) == (raw.messages is None):
        found = "neither" if raw.text_input is None else "both"
        raise BadRequest(f"exactly one of text_input and messages must be given, found {found}")
    if len(raw.media) > limits.max_media_items:
        raise TooLarge(f"media: {len(raw.media)} elements, the limit is {limits.max_media_items}")
    if raw.text_input is not None:
        return _chat_of_text(raw.text_input, raw.media, limits)
    return _ChatParser(raw, limits).parse()


def _chat_of_text(raw: bytes, media: Sequence[bytes], limits: RequestLimits) -> tuple[Message, ...]:
    if media:
        raise BadRequest("media: text_input has no place for media; use messages, whose parts say where each one goes")
    if len(raw) > limits.max_request_bytes:
        raise TooLarge(f"text_input: {len(raw)} bytes, the limit is {limits.max_request_bytes}")
    if not raw:
        raise BadRequest("text_input: is empty")
    return (Message("user", (TextPart(decode_utf8(raw, "text_input")),)),)


class _ChatParser:
    """Reads `messages`, handing out the elements of `media` in order."""

    def __init__(self, raw: RawRequest, limits: RequestLimits) -> None:
        self._raw = raw
        self._limits = limits
        self._media_used = 0
        self._media_seen = 0
        self._text_bytes = 0

    def parse(self) -> tuple[Message, ...]:
        limits = self._limits
        base64_bytes = limits.max_media_items * _base64_length(limits.max_media_bytes)
        tree = parse_json(
            self._raw.messages or b"", "messages", max_bytes=limits.max_request_bytes, max_media_bytes=base64_bytes
        )
        if not isinstance(tree, list) or not tree:
            raise BadRequest(f"messages: must be an array of at least one message (got {shown(tree)})")
        if len(tree) > limits.max_messages:
            raise TooLarge(f"messages: {len(tree)} messages, the limit is {limits.max_messages}")
        chat = tuple(self._message(item, index) for index, item in enumerate(tree))
        self._check_whole(chat)
        return chat

    def _check_whole(self, chat: tuple[Message, ...]) -> None:
        if chat[-1].role != "user":
            raise BadRequest(
                f"messages[{len(chat) - 1}].role: the last message must be the user's (got {chat[-1].role})"
            )
        if not any(isinstance(part, MediaPart) or part.text for part in chat[-1].parts):
            raise BadRequest(f"messages[{len(chat) - 1}].content: is empty")
        if self._media_used != len(self._raw.media):
            raise BadRequest(
                f"media: {len(self._raw.media)} elements are given but messages take {self._media_used}; "
                'every element needs a part {"type": "image" | "audio" | "video"}'
            )

    def _message(self, item: Any, index: int) -> Message:
        path = f"messages[{index}]"
        turn = _validate(_Turn, item, path)
        if turn.role == "system" and index:
            raise BadRequest(f"{path}.role: system is allowed only as the first message")
        if isinstance(turn.content, str):
            return Message(turn.role, (self._text(turn.content),))
        if not isinstance(turn.content, list) or not turn.content:
            raise BadRequest(f"{path}.content: must be a string or an array of parts (got {shown(turn.content)})")
        parts = tuple(self._part(part, f"{path}.content[{place}]") for place, part in enumerate(turn.content))
        if turn.role != "user" and any(isinstance(part, MediaPart) for part in parts):
            raise BadRequest(f"{path}.content: media are allowed only in messages of the role user (got {turn.role})")
        return Message(turn.role, parts)

    def _part(self, item: Any, path: str) -> Part:
        if not isinstance(item, dict):
            raise BadRequest(f"{path}: must be an object (got {shown(item)})")
        kind = item.get("type")
        schema = _PART_SCHEMAS.get(kind) if isinstance(kind, str) else None
        if schema is None:
            raise BadRequest(f"{path}.type: must be one of {', '.join(_PART_SCHEMAS)} (got {shown(kind)})")
        part = _validate(schema, item, path)
        return self._text(part.text) if isinstance(part, _Text) else self._medium(part, path)

    def _text(self, text: str) -> TextPart:
        self._text_bytes += len(text.encode("utf-8"))
        if self._text_bytes > self._limits.max_request_bytes:
            raise TooLarge(
                f"messages: over {self._limits.max_request_bytes} bytes of text, which is this deployment's limit"
            )
        return TextPart(text)

    def _medium(self, part: _Strict, path: str) -> MediaPart:
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
        if index >= len(self._raw.media):
            raise BadRequest(f"{path}: takes element {index} of media, but media has {len(self._raw.media)} elements")
        self._media_used += 1
        data = self._raw.media[index]
        if data[:5].lower() == b"data:":
            return _from_url(decode_utf8(data, f"media[{index}]"), f"media[{index}]", self._limits)
        return _checked_length(data, f"media[{index}]", self._limits)


def _base64_length(size: int) -> int:
    return (size + 2) // 3 * 4


def _from_url(url: str, path: str, limits: RequestLimits) -> bytes:
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


SchemaT = TypeVar("SchemaT", bound=_Strict)


def _validate(schema: type[SchemaT], tree: Any, path: str) -> SchemaT:
    if not isinstance(tree, dict):
        raise BadRequest(f"{path}: must be an object (got {shown(tree)})")
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        raise BadRequest(_describe(error, path)) from error


def _describe(error: ValidationError, path: str) -> str:
    """The first fault as `path.to.key: what is allowed (got what came)`, and how many more there are."""
    items = error.errors(include_url=False)
    first = items[0]
    where = path + "".join(
        f"[{step}]" if isinstance(step, int) else f".{shown(step)[1:-1] if step.isidentifier() else shown(step)}"
        for step in first["loc"]
    )
    if first["type"] == "extra_forbidden":
        text = f"{where}: unknown key"
    elif first["type"] == "missing":
        text = f"{where}: is required"
    else:
        text = f"{where}: {first['msg']} (got {shown(first['input'])})"
    return text if len(items) == 1 else f"{text}; and {len(items) - 1} more"
