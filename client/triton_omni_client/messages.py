# SPDX-License-Identifier: Apache-2.0
"""START HERE: the public contract as types. `Request` makes input tensors; `outputs.py` makes deltas of output tensors.

Pure: no socket, no gRPC, no clock. `protocol.py` puts these tensors on a wire, `client.py`, `aio.py`
and `http.py` are thin shells over both.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from .audio import SAMPLE_RATE, Waveform
from .errors import BadRequest, Internal
from .parsing import as_list, as_mapping, optional, parsed
from .sampling import MediaOptions, TalkerOptions, ThinkerOptions, Token2WavOptions
from .tool_calls import ToolCall, ToolCallDelta

AudioFormat = Literal["f32", "pcm16", "wav"]
Modality = Literal["text", "audio"]
MediaKind = Literal["image", "audio", "video"]
Datatype = Literal["BYTES", "FP32"]

MODEL = "qwen2_5_omni"
UNARY_MODEL = "qwen2_5_omni_unary"

INPUTS: dict[str, Datatype] = {
    "text_input": "BYTES",
    "messages": "BYTES",
    "media": "BYTES",
    "sampling_parameters": "BYTES",
}
OUTPUTS: dict[str, Datatype] = {
    "text_output": "BYTES",
    "audio_output": "FP32",
    "audio_base64": "BYTES",
    "info": "BYTES",
}

_LENGTH = struct.Struct("<I")
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Tensor:
    """One tensor as Triton sends it: `data` is raw little-endian bytes, each BYTES element after its length."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of_bytes(cls, name: str, elements: Sequence[bytes]) -> Tensor:
        """A BYTES tensor [N] of N elements."""
        return cls(name, "BYTES", (len(elements),), b"".join(_LENGTH.pack(len(e)) + e for e in elements))

    def text(self) -> str:
        """The UTF-8 text of a BYTES tensor of one element; a tensor of no element is the empty text.

        Raises:
            Internal: another datatype, or bytes that are not what the shape says.
        """
        self._expect("BYTES")
        if not self.data:
            return ""
        try:
            (length,) = _LENGTH.unpack_from(self.data)
            found = self.data[_LENGTH.size :].decode("utf-8")
        except (struct.error, UnicodeDecodeError) as error:
            raise Internal(f"output {self.name}: not one UTF-8 element: {error}") from error
        if length != len(self.data) - _LENGTH.size:
            raise Internal(f"output {self.name}: expected one element, found shape {list(self.shape)}")
        return found

    def waveform(self) -> Waveform:
        """The samples of an FP32 tensor [S].

        Raises:
            Internal: another datatype, a number of bytes that does not fit the shape, or samples that are not finite.
        """
        self._expect("FP32")
        if len(self.data) != math.prod(self.shape) * _FLOAT_BYTES:
            raise Internal(f"output {self.name}: {len(self.data)} bytes do not fit shape {list(self.shape)}")
        samples = np.frombuffer(self.data, dtype="<f4").astype(np.float32)
        if not np.isfinite(samples).all():
            raise Internal(f"output {self.name}: holds samples that are not finite")
        return samples

    def _expect(self, datatype: Datatype) -> None:
        if self.datatype != datatype:
            raise Internal(f"output {self.name}: expected {datatype}, found {self.datatype}")


@dataclass(frozen=True)
class Media:
    """One encoded medium: the bytes of its file.

    A sound is wav, mp3, flac, ogg, aac, amr, or an mp4 (m4a) or webm of sound alone; a picture is png, jpeg or webp;
    a video is mp4 or webm.
    """

    kind: MediaKind
    data: bytes = field(repr=False)
    name: str = field(default="", compare=False)
    """Its name in errors, such as that of its file; empty where it has none."""

    @classmethod
    def from_file(cls, kind: MediaKind, path: str | Path) -> Media:
        """Read a file.

        Raises:
            BadRequest: the file cannot be read.
        """
        try:
            return cls(kind, Path(path).read_bytes(), str(path))
        except OSError as error:
            raise BadRequest(f"{kind} {path}: cannot be read: {error.strerror}") from error


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request: its content and options. Exactly one of `text` and `messages` is given; None leaves a choice to the
    server.

    Raises:
        BadRequest: both or none of `text` and `messages`, or a value that no server accepts.
    """

    text: str | None = None
    """One user message, the short form."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """A chat, OpenAI style; a part `{"type": "image" | "audio" | "video"}` takes the next element of `media`."""
    media: Sequence[bytes] = field(default=(), repr=False)
    """Encoded files, in the order of the parts that take them."""
    media_names: Sequence[str] = field(default=(), repr=False, compare=False)
    """Names of the media in errors, in their order; empty = by kind and number."""
    modalities: Sequence[Modality] | None = None
    voice: str | None = None
    seed: int | None = None
    audio_format: AudioFormat = "f32"
    """How audio travels; the client decodes each to the same float32 waveform. `pcm16` and `wav` halve the bytes of
    `f32` less a third for base64, and cost 16-bit rounding."""
    use_audio_in_video: bool | None = None
    audio_in_pieces: bool | None = None
    """True: sounds are taken in windows of two seconds, so a longer sound begins with the same tokens as a shorter one.
    Requests that are to share what the server kept of a sound all say so."""
    mm_processor_kwargs: MediaOptions | Mapping[str, Any] = field(default_factory=dict)
    """Options of images and videos, for example `{"fps": 1, "max_frames": 64, "max_pixels": 401408}`."""
    thinker: ThinkerOptions | Mapping[str, Any] = field(default_factory=dict)
    """Sampling of the thinker, for example `{"temperature": 0.7, "max_tokens": 200, "stop": ["\\n"]}`."""
    talker: TalkerOptions | Mapping[str, Any] = field(default_factory=dict)
    token2wav: Token2WavOptions | Mapping[str, Any] = field(default_factory=dict)
    priority: int | None = None
    """-100 to 100: of the requests that wait for a place in an engine, the lowest goes first, then the oldest."""
    cache_salt: str | None = field(default=None, repr=False)
    """A secret of up to 256 characters: requests that name the same one share what the server kept of their prompts."""
    cache: bool | None = None
    """False: the server neither reads nor keeps anything, whatever the salt."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Functions that the reply may call, OpenAI style; for example
    `{"type": "function", "function": {"name": "hang_up", "parameters": {"type": "object"}}}`.
    """
    tool_choice: str | Mapping[str, Any] | None = None
    """`auto`, `none`, `required`, or `{"type": "function", "function": {"name": …}}`."""
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    prefill_only: bool | None = None
    """True: the server keeps the prompt for later requests of this `cache_salt`, which is needed, and makes no reply;
    it refuses this where it has no prefix cache."""
    timeout: float | None = None
    """Seconds for the whole request; the server gives up after it, and so does the client."""
    request_id: str = ""
    """A label for logs."""
    traceparent: str = ""
    """The caller's span (W3C Trace Context), under which a server that traces puts its own."""

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise BadRequest("give exactly one of text and messages")
        if self.audio_format not in get_args(AudioFormat):
            raise BadRequest(f"audio_format {self.audio_format!r} is none of {list(get_args(AudioFormat))}")
        if self.timeout is not None and not (self.timeout > 0 and math.isfinite(self.timeout)):
            raise BadRequest(f"timeout {self.timeout} is not a positive number of seconds")

    @classmethod
    def ask(cls, text: str = "", media: Sequence[Media] = (), **options: Any) -> Request:
        """A request of one user message: `media` first, in order, then `text`.

        Args:
            text: what the user says; may be empty beside media.
            media: what the user shows or plays.
            options: the other fields of `Request`.
        """
        if not media:
            return cls(text=text, **options)
        content: list[dict[str, str]] = [{"type": medium.kind} for medium in media]
        if text:
            content.append({"type": "text", "text": text})
        message = {"role": "user", "content": content}
        return cls(messages=[message], **media_fields(media), **options)

    def sampling_parameters(self) -> dict[str, Any]:
        """The JSON object of that name: what was chosen, and nothing of what was left to the server."""
        chosen: dict[str, Any] = {
            "modalities": None if self.modalities is None else list(self.modalities),
            "voice": self.voice,
            "seed": self.seed,
            "audio_format": None if self.audio_format == "f32" else self.audio_format,
            "use_audio_in_video": self.use_audio_in_video,
            "audio_in_pieces": self.audio_in_pieces,
            "mm_processor_kwargs": dict(self.mm_processor_kwargs) or None,
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "cache": self.cache,
            "tools": None if self.tools is None else list(self.tools),
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "prefill_only": self.prefill_only,
            "timeout": self.timeout,
            "thinker": dict(self.thinker) or None,
            "talker": dict(self.talker) or None,
            "token2wav": dict(self.token2wav) or None,
        }
        return {name: value for name, value in chosen.items() if value is not None}

    def check(self) -> None:
        """Find out before it is sent whether it can be.

        Raises:
            BadRequest: it cannot, as `to_tensors` has it.
        """
        replace(self, media=()).to_tensors()

    def to_tensors(self) -> list[Tensor]:
        """The input tensors of either model; optional inputs that say nothing are left out.

        Raises:
            BadRequest: messages or stage parameters that JSON cannot express.
        """
        tensors = []
        if self.text is not None:
            tensors.append(Tensor.of_bytes("text_input", [_utf8("text", self.text)]))
        if self.messages is not None:
            tensors.append(Tensor.of_bytes("messages", [_json("messages", list(self.messages))]))
        if self.media:
            tensors.append(Tensor.of_bytes("media", self.media))
        if parameters := self.sampling_parameters():
            tensors.append(Tensor.of_bytes("sampling_parameters", [_json("sampling_parameters", parameters)]))
        return tensors


def media_fields(media: Sequence[Media]) -> dict[str, Any]:
    """The fields of a `Request` that hold these media; one without a name is called by kind and number."""
    names = [medium.name or f"medium {number} ({medium.kind})" for number, medium in enumerate(media)]
    return {"media": [medium.data for medium in media], "media_names": names}


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRequest(f"{name}: not valid Unicode text: {error.reason} at {error.start}") from error


def _json(name: str, value: object) -> bytes:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadRequest(f"{name}: not expressible as JSON: {error}") from error
    return _utf8(name, text)


@dataclass(frozen=True)
class TextDelta:
    """The next piece of the reply's text."""

    text: str


@dataclass(frozen=True, eq=False)
class AudioDelta:
    """The next samples of the reply's speech: float32 [S] in [-1, 1], mono, 24 kHz."""

    samples: Waveform

    @property
    def seconds(self) -> float:
        """Length of this piece."""
        return len(self.samples) / SAMPLE_RATE


@dataclass(frozen=True)
class Info:
    """The server's account of a finished request, its last message; None where the server does not say."""

    finish_reason: Mapping[str, str | None] = field(default_factory=dict)
    """Why each stage ended, for example `{"thinker": "stop", "talker": "length"}`; None for one that had no part. The
    thinker's is `tool_calls` where it ended with calls.
    """
    tool_calls: Sequence[ToolCall] = ()
    """All calls of the reply."""
    stop_string: str | None = None
    """The stop string of the thinker that ended the reply."""
    prompt_tokens: int | None = None
    prompt_tokens_details: Mapping[str, int] = field(default_factory=dict)
    """`text_tokens`, `audio_tokens`, `image_tokens` and `video_tokens` of the prompt; the sum is `prompt_tokens`."""
    reply_tokens: int | None = None
    codes: int | None = None
    samples: int | None = None
    seed: int | None = None
    """The seed that repeats this reply, drawn by the server where the request gave none."""
    time_to_first_text_ms: float | None = None
    """At the server, from taking the request to sending its first text."""
    time_to_first_audio_ms: float | None = None
    stage_ms: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    """Milliseconds a stage, from taking the request to its `first` output and until it was `done`."""
    raw: Mapping[str, Any] = field(default_factory=dict)
    """The whole object as sent, with keys that this client does not know."""

    @classmethod
    def from_json(cls, text: str) -> Info:
        """Read the `info` output.

        Raises:
            Internal: no JSON object, or a known key of a wrong type.
        """
        try:
            raw = as_mapping(parsed(text), "info")
        except ValueError as error:
            raise Internal(f"info: not JSON: {error}") from error
        usage = as_mapping(raw.get("usage", {}), "info.usage")
        reasons = as_mapping(raw.get("finish_reason", {}), "info.finish_reason")
        stages = as_mapping(raw.get("stage_ms", {}), "info.stage_ms")
        details = as_mapping(usage.get("prompt_tokens_details", {}), "info.usage.prompt_tokens_details")
        return cls(
            finish_reason={stage: optional(reasons, stage, str) for stage in reasons},
            stage_ms={stage: _times(value, f"info.stage_ms.{stage}") for stage, value in stages.items()},
            stop_string=optional(raw, "stop_string", str),
            tool_calls=[ToolCall.from_json(call) for call in as_list(raw.get("tool_calls", []), "info.tool_calls")],
            seed=optional(raw, "seed", int),
            prompt_tokens_details={kind: optional(details, kind, int) for kind in details},
            raw=raw,
            **{name: optional(usage, name, int) for name in ("prompt_tokens", "reply_tokens", "codes", "samples")},
            **{name: optional(raw, name, float) for name in ("time_to_first_text_ms", "time_to_first_audio_ms")},
        )


def _times(value: object, path: str) -> dict[str, Any]:
    found = as_mapping(value, path)
    return {name: optional(found, name, float) for name in found}


Delta = TextDelta | AudioDelta | ToolCallDelta | Info
