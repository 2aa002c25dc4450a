# SPDX-License-Identifier: Apache-2.0
"""One request as a client sends it: bytes in, a checked and frozen `OmniRequest` out.

Everything is refused by name here, before media are decoded or an engine is asked. This module knows neither the
tokenizer nor what is inside a medium.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from triton_omni.core.errors import BadRequest, TooLarge
from triton_omni.core.settings import Lead, RequestLimits, Solver
from triton_omni.request.chat import MediaPart, Message, chat_of_text, parse_messages
from triton_omni.request.schema_limits import check_schema_limits
from triton_omni.request.strict_json import StrictModel, compact_json, parse_json, shown, validate, without_nulls
from triton_omni.request.tools import NO_CALLS, ToolParameters, Tools, read_tools
from triton_omni.session.engine import Sampling, StreamOptions, ToolRules

Modality = Literal["text", "audio"]
AudioFormat = Literal["f32", "pcm16", "wav"]

_TOKEN_ID: Final = re.compile(r"0|[1-9][0-9]{0,8}")
"""Each id has one spelling, so that none is given twice."""
MAX_SEED: Final = 2**63 - 1
_TALKER_SEEDS: Final = MAX_SEED + 1
"""The first of the talker's seeds."""
MAX_PARAMETERS_BYTES = 1 << 18
MIN_FRAME_PIXELS: Final = 128 * 28 * 28
"""The model's processor scales smaller frames up to it."""
MAX_IMAGE_PIXELS: Final = 16384 * 28 * 28
"""The model's processor scales larger pictures down to it."""

Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=0, le=1 << 20)]
MinP = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=0.1, le=10)]
AdditivePenalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenCount = Annotated[int, Field(ge=1, le=131072)]
Priority = Annotated[int, Field(ge=-100, le=100)]
LeastTokens = Annotated[int, Field(ge=0, le=131072)]


class ThinkerOptions(StrictModel):
    """Sampling of the thinker's reply; greedy by default, as in HF's `generate`."""

    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: Penalty = 1.0
    presence_penalty: AdditivePenalty = 0.0
    frequency_penalty: AdditivePenalty = 0.0
    logit_bias: Annotated[dict[str, Bias], BeforeValidator(without_nulls)] = Field(default_factory=dict)
    """By token id in decimal, since JSON has no other keys."""
    stop: list[Annotated[str, StringConstraints(min_length=1)]] = Field(default_factory=list)
    """The reply's text ends before the first of these strings."""
    json_schema: dict[str, Any] | None = None
    """The reply is JSON of this schema."""
    max_tokens: TokenCount | None = None
    """None = what the deployment allows."""
    min_tokens: LeastTokens = 0
    """The reply does not end by itself before so many tokens."""

    def to_sampling(self, seed: int, limit: int, tools: ToolRules | None = None) -> Sampling:
        """The engine's `Sampling`; at most `limit` tokens, whatever was asked."""
        bias = tuple((int(token), value) for token, value in self.logit_bias.items())
        schema = None if self.json_schema is None else compact_json(self.json_schema)
        chosen = {"logit_bias": bias, "stop": tuple(self.stop), "json_schema": schema, "tools": tools}
        return _sampling(vars(self) | chosen, seed, limit)


class TalkerOptions(StrictModel):
    """Sampling of the talker's codes; the defaults are HF's `talker_*` arguments of `generate`."""

    temperature: Temperature = 0.9
    top_p: TopP = 0.8
    top_k: TopK = 40
    min_p: MinP = 0.0
    repetition_penalty: Penalty = 1.05
    presence_penalty: AdditivePenalty = 0.0
    frequency_penalty: AdditivePenalty = 0.0
    max_tokens: TokenCount | None = None
    """Codec codes, 50 a second; None = what the deployment allows."""
    min_tokens: LeastTokens = 0
    """The speech does not end by itself before so many codes."""

    def to_sampling(self, seed: int, limit: int) -> Sampling:
        """The engine's `Sampling`; at most `limit` codes, whatever was asked."""
        return _sampling(dict(vars(self)), seed, limit)


def talker_seed(seed: int) -> int:
    """The talker's seed in [2^63, 2^64) of a request's in [0, 2^63).

    Thinker and talker draw by the same function of (seed, position): with one seed they would draw by the same numbers.
    """
    return seed + _TALKER_SEEDS


def _sampling(options: dict[str, Any], seed: int, limit: int) -> Sampling:
    asked = options.pop("max_tokens")
    return Sampling(**options, seed=seed, max_tokens=limit if asked is None else min(asked, limit))


class Token2WavOptions(StrictModel):
    """Options for making the waveform; None = the value of the deployment's `stage.yaml`."""

    preset: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = None
    solver: Solver | None = None
    num_steps: Annotated[int, Field(ge=2, le=64)] | None = None
    guidance_scale: Annotated[float, Field(ge=0, le=10)] | None = None
    mode: Literal["streaming", "offline"] | None = None
    max_lead_s: Lead | None = None

    def to_stream_options(self) -> StreamOptions:
        """The engine's `StreamOptions`."""
        return StreamOptions(**vars(self))


class MediaOptions(StrictModel):
    """Number of frames of a video, and sizes of pictures; the names are those of vLLM's server."""

    fps: Annotated[float, Field(gt=0, le=60)] | None = None
    """Frames a second of a video; None = 2."""
    max_frames: Annotated[int, Field(ge=2)] | None = None
    """Maximum frames of one video; None = the deployment's limit."""
    max_pixels: Annotated[int, Field(ge=MIN_FRAME_PIXELS, le=MAX_IMAGE_PIXELS)] | None = None
    """Maximum pixels of one image or frame, which are scaled down to it; None = the limit of the model card's
    recipe.
    """


def _text_and_audio() -> list[Modality]:
    return ["text", "audio"]


MAX_SALT: Final = 256
"""Characters of `cache_salt`."""


class _Parameters(ToolParameters):
    """The schema of `sampling_parameters`."""

    modalities: Annotated[list[Modality], Field(min_length=1, max_length=2)] = Field(default_factory=_text_and_audio)
    voice: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    audio_format: AudioFormat = "f32"
    use_audio_in_video: bool = False
    audio_in_pieces: bool = False
    mm_processor_kwargs: MediaOptions = MediaOptions()
    thinker: ThinkerOptions = ThinkerOptions()
    talker: TalkerOptions = TalkerOptions()
    token2wav: Token2WavOptions = Token2WavOptions()
    priority: Priority = 0
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=MAX_SALT)] | None = None
    cache: bool = True
    prefill_only: bool = False
    timeout: Annotated[float, Field(gt=0)] | None = None


def sampling_places(key: str) -> list[str]:
    """Return every path of `sampling_parameters` that has this key; empty if none has."""
    stages: dict[str, type[StrictModel]] = {
        "thinker": ThinkerOptions,
        "talker": TalkerOptions,
        "token2wav": Token2WavOptions,
        "mm_processor_kwargs": MediaOptions,
    }
    places = ["sampling_parameters"] if key in _Parameters.model_fields else []
    return places + [f"sampling_parameters.{name}" for name, kind in stages.items() if key in kind.model_fields]


@dataclass(frozen=True)
class RawRequest:
    """The inputs of one request as Triton gives them; an absent input is None (`media`: empty)."""

    text_input: bytes | None = None
    messages: bytes | None = None
    media: Sequence[bytes] = ()
    sampling_parameters: bytes | None = None
    request_id: str = ""
    timeout_us: int = 0
    """Triton's own parameter `timeout`, in microseconds; 0 = not given."""
    traceparent: str = ""
    """W3C's, unchecked; empty where nobody traces requests."""


@dataclass(frozen=True)
class RequestDefaults:
    """Defaults and bounds of the deployment besides `RequestLimits`."""

    timeout_s: float = 120.0
    max_timeout_s: float = 3600.0
    max_thinker_tokens: int = 1024
    max_codes: int = 4096
    vocabulary: int | None = None
    """Ids of the thinker's vocabulary; None = not checked here."""
    voice: str | None = None
    """Speaker of a request that names none; None = the checkpoint's first."""
    voices: frozenset[str] = frozenset()
    """Speakers of the checkpoint; empty = not checked here."""


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
    audio_in_pieces: bool
    """True: the model's view of a sound's start does not depend on its continuation."""
    mm_processor_kwargs: MediaOptions
    thinker: ThinkerOptions
    talker: TalkerOptions
    token2wav: Token2WavOptions
    priority: int
    """The lower, the sooner it gets a place in an engine's batch."""
    cache_salt: str | None = field(repr=False)
    """Requests of equal salt share the prefix cache; None = the request does not use the cache."""
    tools: Tools | None
    """None = the request has neither tools nor calls."""
    prefill_only: bool
    """True: there is no reply; a later request finds the prompt in the caches."""
    timeout_s: float
    request_id: str

    @property
    def wants_audio(self) -> bool:
        """True if the reply is spoken."""
        return "audio" in self.modalities

    @property
    def tool_rules(self) -> ToolRules | None:
        """The functions that the reply may call; None = the request has neither tools nor calls."""
        return None if self.tools is None else self.tools.rules

    @property
    def media(self) -> tuple[MediaPart, ...]:
        """Every medium, in the order of the chat."""
        return tuple(part for message in self.chat for part in message.parts if isinstance(part, MediaPart))


def parse_request(raw: RawRequest, limits: RequestLimits, defaults: RequestDefaults) -> OmniRequest:
    """Check everything a client sent.

    Raises:
        BadRequest: a value is wrong; the message names the key path, the value and what is allowed.
        TooLarge: a limit of the deployment is exceeded.
    """
    parameters = _parse_parameters(raw.sampling_parameters, limits, defaults)
    tools = _parse_tools(parameters, limits)
    chat = _parse_chat(raw, limits)
    ordered: tuple[Modality, ...] = ("text", "audio") if "audio" in parameters.modalities else ("text",)
    return OmniRequest(
        chat=chat,
        modalities=ordered,
        voice=parameters.voice if parameters.voice is not None else defaults.voice,
        seed=parameters.seed,
        audio_format=parameters.audio_format,
        use_audio_in_video=parameters.use_audio_in_video,
        audio_in_pieces=parameters.audio_in_pieces,
        mm_processor_kwargs=parameters.mm_processor_kwargs,
        thinker=parameters.thinker,
        talker=parameters.talker,
        token2wav=parameters.token2wav,
        priority=parameters.priority,
        cache_salt=parameters.cache_salt if parameters.cache else None,
        tools=tools or (NO_CALLS if any(message.calls for message in chat) else None),
        prefill_only=parameters.prefill_only,
        timeout_s=_timeout_s(raw, parameters, defaults),
        request_id=raw.request_id,
    )


def _timeout_s(raw: RawRequest, parameters: _Parameters, defaults: RequestDefaults) -> float:
    """Return the smaller of the given timeouts, else the default."""
    by_triton_s = raw.timeout_us / 1e6 if raw.timeout_us else None
    if by_triton_s is not None and by_triton_s > defaults.max_timeout_s:
        limit = f"this deployment's limit of {defaults.max_timeout_s * 1e6:.0f}"
        raise TooLarge(f"timeout: {raw.timeout_us} us (Triton's parameter) is over {limit} us")
    return min((given for given in (parameters.timeout, by_triton_s) if given is not None), default=defaults.timeout_s)


def _parse_parameters(raw: bytes | None, limits: RequestLimits, defaults: RequestDefaults) -> _Parameters:
    name = "sampling_parameters"
    tree = parse_json(raw or b"null", name, max_bytes=MAX_PARAMETERS_BYTES)
    parameters = validate(_Parameters, {} if tree is None else tree, name)
    if "text" not in parameters.modalities or len(set(parameters.modalities)) < len(parameters.modalities):
        raise BadRequest(f'{name}.modalities: must be ["text"] or ["text", "audio"] (got {parameters.modalities})')
    _check_lengths(parameters.thinker, defaults.max_thinker_tokens, f"{name}.thinker")
    _check_lengths(parameters.talker, defaults.max_codes, f"{name}.talker")
    _check_bias(parameters.thinker.logit_bias, limits, defaults, f"{name}.thinker.logit_bias")
    _check_stop(parameters.thinker.stop, limits, f"{name}.thinker.stop")
    _check_schema(parameters.thinker, limits, f"{name}.thinker")
    _at_most(
        parameters.mm_processor_kwargs.max_frames, limits.max_video_frames, f"{name}.mm_processor_kwargs.max_frames"
    )
    _at_most(parameters.timeout, defaults.max_timeout_s, f"{name}.timeout")
    if parameters.prefill_only and not (parameters.cache and parameters.cache_salt):
        raise BadRequest(
            f"{name}.prefill_only: no request could find the prompt; add cache_salt, and leave cache at true"
        )
    if parameters.voice is not None and defaults.voices and parameters.voice not in defaults.voices:
        known = ", ".join(sorted(defaults.voices))
        raise BadRequest(f"{name}.voice: {shown(parameters.voice)} is not one of: {known}")
    return parameters


def _parse_tools(parameters: _Parameters, limits: RequestLimits) -> Tools | None:
    tools = read_tools(parameters, limits, "sampling_parameters")
    if tools is not None and parameters.thinker.min_tokens:
        where = "sampling_parameters.thinker.min_tokens"
        raise BadRequest(f"{where}: must be 0 beside tools, whose calls say when the reply may end")
    return tools


def _check_lengths(options: ThinkerOptions | TalkerOptions, limit: int, path: str) -> None:
    _at_most(options.max_tokens, limit, f"{path}.max_tokens")
    _at_most(options.min_tokens, limit, f"{path}.min_tokens")
    if options.max_tokens is not None and options.min_tokens > options.max_tokens:
        raise BadRequest(f"{path}.min_tokens: {options.min_tokens} is over max_tokens, {options.max_tokens}")


def _check_bias(bias: dict[str, float], limits: RequestLimits, defaults: RequestDefaults, path: str) -> None:
    if len(bias) > limits.max_logit_bias:
        raise TooLarge(f"{path}: {len(bias)} token ids, the limit is {limits.max_logit_bias}")
    for token in bias:
        if not _TOKEN_ID.fullmatch(token):
            raise BadRequest(f"{path}: {shown(token)} is not a token id in decimal")
        if defaults.vocabulary is not None and int(token) >= defaults.vocabulary:
            raise BadRequest(f"{path}: token id {token} is not in the vocabulary, 0 to {defaults.vocabulary - 1}")


def _check_stop(stop: list[str], limits: RequestLimits, path: str) -> None:
    if len(stop) > limits.max_stop_strings:
        raise TooLarge(f"{path}: {len(stop)} strings, the limit is {limits.max_stop_strings}")
    for index, string in enumerate(stop):
        if len(string) > limits.max_stop_characters:
            limit = limits.max_stop_characters
            raise TooLarge(f"{path}[{index}]: {len(string)} characters, the limit is {limit}")


def _check_schema(options: ThinkerOptions, limits: RequestLimits, path: str) -> None:
    if options.json_schema is None:
        return
    if options.min_tokens:
        raise BadRequest(f"{path}.min_tokens: must be 0 beside json_schema, which says when the reply may end")
    check_schema_limits(options.json_schema, f"{path}.json_schema")
    size = len(compact_json(options.json_schema).encode())
    if size > limits.max_schema_bytes:
        raise TooLarge(f"{path}.json_schema: {size} bytes, the limit is {limits.max_schema_bytes}")


def _at_most(value: float | None, limit: float, path: str) -> None:
    if value is not None and value > limit:
        raise TooLarge(f"{path}: {value} is over this deployment's limit of {limit}")


def _parse_chat(raw: RawRequest, limits: RequestLimits) -> tuple[Message, ...]:
    if raw.text_input is not None and raw.messages is None:
        return chat_of_text(raw.text_input, raw.media, limits)
    if raw.messages is not None and raw.text_input is None:
        return parse_messages(raw.messages, raw.media, limits)
    found = "neither" if raw.messages is None else "both"
    raise BadRequest(f"exactly one of text_input and messages must be given, found {found}")
