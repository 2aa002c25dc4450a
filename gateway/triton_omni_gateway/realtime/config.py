# SPDX-License-Identifier: Apache-2.0
"""The configuration of a session: what a client may set, as types, and how an update changes it. Pure.

A key that is given as null counts as not given, known or not; three of them are turned off by null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StrictBool, StrictStr, Tag, model_validator

from triton_omni_gateway.schemas import MAX_ITEMS, without_nulls

Json = dict[str, Any]
Modality = Literal["text", "audio"]
Rate = Literal[8000, 16000, 24000]
_MERGED = ("audio", "input", "output")
"""Objects whose keys are updated one by one; all others are replaced."""
OFF_BY_NULL = frozenset({"turn_detection", "transcription", "noise_reduction"})
_LONGEST_REPLY = 4096
_REALTIME, _TRANSCRIPTION = "realtime-session", "transcription-session"
"""Names for both types of sessions; being no identifiers, they are left out where a refusal names a key."""
_Ratio = Annotated[float, Field(strict=True, ge=0, le=1)]
_Milliseconds = Annotated[int, Field(strict=True, ge=0)]
_Words = Annotated[tuple[StrictStr, ...], Field(max_length=MAX_ITEMS)]


class Strict(BaseModel):
    """A type that knows all its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: object) -> object:
        """Leave out what is null: programs send all keys that they know."""
        return without_nulls(given, kept=OFF_BY_NULL)


class PcmFormat(Strict):
    """Little-endian PCM16, mono; replies are of 24 kHz."""

    type: Literal["audio/pcm"]
    rate: Rate = 24000


class G711Format(Strict):
    """G.711 at 8 kHz, one byte a sample: mu-law or A-law."""

    type: Literal["audio/pcmu", "audio/pcma"]
    rate: Literal[8000] = 8000


SoundFormat = PcmFormat | G711Format
_Format = Annotated[SoundFormat, Field(discriminator="type")]


class ServerVad(Strict):
    """Turns by the sound alone."""

    type: Literal["server_vad"]
    threshold: _Ratio = 0.5
    prefix_padding_ms: _Milliseconds = 300
    silence_duration_ms: _Milliseconds = 500
    create_response: StrictBool = True
    interrupt_response: StrictBool = True
    idle_timeout_ms: Annotated[int, Field(strict=True, ge=5000, le=30000)] | None = None


class SemanticVad(Strict):
    """Turns by what is said, too."""

    type: Literal["semantic_vad"]
    eagerness: Literal["low", "medium", "high", "auto"] = "auto"
    create_response: StrictBool = True
    interrupt_response: StrictBool = True


TurnDetection = Annotated[ServerVad | SemanticVad, Field(discriminator="type")]


class Transcription(Strict):
    """Ask for the text of what the user says.

    `model` may have any name, since the thinker writes it; the languages and `delay` have no effect: it hears them.
    """

    model: StrictStr | None = None
    language: StrictStr | None = None
    languages: _Words = ()
    prompt: StrictStr | None = None
    keywords: _Words = ()
    delay: StrictStr | None = None


class NoiseReduction(Strict):
    """OpenAI's; taken and of no effect."""

    type: Literal["near_field", "far_field"] | None = None
    strength: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class AudioInput(Strict):
    """Sound that comes."""

    format: _Format = PcmFormat(type="audio/pcm")
    turn_detection: TurnDetection | None = None
    transcription: Transcription | None = None
    noise_reduction: NoiseReduction | None = None


class AudioOutput(Strict):
    """Sound that goes."""

    format: _Format = PcmFormat(type="audio/pcm")
    voice: StrictStr | None = None
    speed: Annotated[float, Field(strict=True, ge=0.25, le=1.5)] = 1.0


class Audio(Strict):
    """Both directions."""

    input: AudioInput = AudioInput()
    output: AudioOutput = AudioOutput()


class TokenLimits(Strict):
    """Limits of the conversation after the instructions."""

    post_instructions: Annotated[int, Field(strict=True, ge=1)] | None = None


class RetentionRatio(Strict):
    """How much of the longest conversation is kept where it gets too long."""

    type: Literal["retention_ratio"]
    retention_ratio: _Ratio
    token_limits: TokenLimits = TokenLimits()


MaxTokens = Annotated[int, Field(strict=True, ge=1, le=_LONGEST_REPLY)] | Literal["inf"]
_Modalities = Annotated[tuple[Modality, ...], Field(min_length=1, max_length=1)]


class FunctionTool(Strict):
    """A function that a reply may call; the Triton server checks its schema."""

    type: Literal["function"]
    name: StrictStr
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None

    def function(self) -> Json:
        """The function as a chat completion has it."""
        return self.model_dump(exclude={"type"}, exclude_none=True)


class NamedTool(Strict):
    """The one function that a reply calls."""

    type: Literal["function"]
    name: StrictStr


class ResponseOptions(Strict):
    """Keys of a session about its responses, and of a response about itself."""

    instructions: StrictStr | None = None
    output_modalities: _Modalities = ("audio",)
    max_output_tokens: MaxTokens = "inf"
    tools: Annotated[tuple[FunctionTool, ...], Field(max_length=MAX_ITEMS)] = ()
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    parallel_tool_calls: StrictBool | None = None


class SessionConfig(ResponseOptions):
    """A `session` object."""

    object_name: ClassVar[str] = "realtime.session"

    type: Literal["realtime"] = "realtime"
    model: StrictStr | None = None
    audio: Audio = Audio()
    truncation: Literal["auto", "disabled"] | RetentionRatio = "auto"
    include: _Words | None = None
    tracing: Any = None
    prompt: None = None
    reasoning: None = None

    def told(self) -> Json:
        """The object as events show it."""
        return self.model_dump(mode="json")


class TranscribedInput(AudioInput):
    """Sound that is written down."""

    transcription: Transcription | None = Transcription()


class TranscribedAudio(Strict):
    """The one direction of a session that makes no responses."""

    input: TranscribedInput = TranscribedInput()


class TranscriptionConfig(Strict):
    """A `session` object of a session that writes down what is said, and does nothing else."""

    object_name: ClassVar[str] = "realtime.transcription_session"

    type: Literal["transcription"]
    audio: TranscribedAudio = TranscribedAudio()
    include: _Words | None = None

    def told(self) -> Json:
        """The object as events show it."""
        return self.model_dump(mode="json")


def _kind_of(given: Any) -> str:
    """Return the kind of a `session` object; one without a `type`, or with a wrong one, is of the usual kind."""
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return _TRANSCRIPTION if kind == "transcription" else _REALTIME


AnyConfig = Annotated[
    Annotated[SessionConfig, Tag(_REALTIME)] | Annotated[TranscriptionConfig, Tag(_TRANSCRIPTION)],
    Discriminator(_kind_of),
]


class ResponseOutput(Strict):
    """Sound of one response; None = the session's."""

    format: _Format | None = None
    voice: StrictStr | None = None


class ResponseAudio(Strict):
    """Sound of one response."""

    output: ResponseOutput = ResponseOutput()


def given_of(value: BaseModel) -> Json:
    """The keys that a client gave."""
    return value.model_dump(mode="json", exclude_unset=True)


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> Json:
    """Return `old` with the keys of `new`."""
    result = dict(old)
    for key, value in new.items():
        result[key] = merged(result.get(key) or {}, value) if key in _MERGED else value
    return result
