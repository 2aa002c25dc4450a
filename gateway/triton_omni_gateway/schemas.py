# SPDX-License-Identifier: Apache-2.0
"""START HERE: what callers may send, as types. An unknown key or a wrong type is refused by name, as OpenAI does it.

A key given as null counts as not given, known or not. Ranges are the Triton server's to check: it names the key, the
value and the limit, and the gateway passes that on.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from .errors import GatewayError, bad_request
from .json_bounds import check_json
from .sound import FASTEST, SLOWEST

_SHOWN, _SHOWN_VALUE = 200, 80
"""Characters of a key, and of a value, in a refusal."""
MAX_ITEMS = 1024
"""Maximum items of any list; the Triton server allows fewer. Without a bound a body of millions would be told item by
item.
"""
Number = Annotated[float, Field(allow_inf_nan=False, strict=True)]
Seconds = Annotated[float, Field(allow_inf_nan=False, strict=True, gt=0)]
"""Seconds of a timeout. The client of Triton refuses others itself, before the server could name the key."""


def without_nulls(given: object, *, kept: Collection[str] = ()) -> object:
    """An object without its keys that are null, but for those `kept`; any other value as it is."""
    if not isinstance(given, dict):
        return given
    return {key: value for key, value in given.items() if value is not None or key in kept}


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: object) -> object:
        """Leave out what is null, also of an unknown key: programs send all keys that they know."""
        return without_nulls(given)


class AudioOptions(_Model):
    """How a reply is spoken."""

    voice: StrictStr | None = None
    """A speaker of the checkpoint; None = the server's choice."""
    format: StrictStr | None = None
    """`wav`, `pcm16`, `mp3`, `opus`, `aac` or `flac`; None = `wav`, and `pcm16` in a stream."""


class StreamOptions(_Model):
    """How a stream is told."""

    include_usage: StrictBool | None = None
    """One more event before the end, with the usage of the whole reply."""
    include_obfuscation: StrictBool | None = None
    """OpenAI's; taken and of no effect: nothing is padded."""
    continuous_usage_stats: StrictBool | None = None
    """vLLM's; taken and of no effect: usage is known at the end."""


class JsonSchema(_Model):
    """A JSON schema as OpenAI wraps it; `strict` or not, the server's replies keep to it."""

    name: StrictStr | None = None
    description: StrictStr | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: StrictBool | None = None


class ResponseFormat(_Model):
    """Plain text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema, and must be given with it")
        return self

    def to_schema(self) -> dict[str, Any] | None:
        """The schema of the reply; None = text."""
        if self.type == "json_object":
            return {"type": "object"}
        return self.json_schema.schema_ if self.json_schema else None


class MediaOptions(_Model):
    """Options that vLLM's server calls `mm_processor_kwargs`."""

    use_audio_in_video: StrictBool | None = None
    fps: Number | None = None
    max_frames: StrictInt | None = None
    max_pixels: StrictInt | None = None


class Message(_Model):
    """One message; parts of `content` are checked by the Triton server.

    `name`, `refusal`, `annotations` and `parsed` (of OpenAI's client) are taken, so that a reply can be sent back as it
    came, and of no effect.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | Annotated[list[dict[str, Any]], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    audio: dict[str, Any] | None = None
    """An earlier spoken reply of the assistant, by its `id`."""
    name: StrictStr | None = None
    refusal: StrictStr | None = None
    annotations: list[Any] | None = None
    parsed: Any = None
    tool_calls: Annotated[list[dict[str, Any]], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    """Functions that the assistant called; the Triton server checks them."""
    tool_call_id: StrictStr | None = None
    """The call whose result a message of the role `tool` is."""
    function_call: None = None


class _Thinker(_Model):
    """Sampling of the text; the names are those of OpenAI and of the server's `thinker` object alike."""

    temperature: Number | None = None
    top_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    stop: StrictStr | Annotated[list[StrictStr], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    logit_bias: Annotated[dict[str, Number], BeforeValidator(without_nulls)] | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: StrictInt | None = None


class _WithoutEffect(_Model):
    """Keys of OpenAI's that label a request, choose how it is billed and stored, or how other models think and write:
    taken and of no effect. Frameworks send some of them for models that they know by name.
    """

    user: StrictStr | None = None
    metadata: dict[str, Any] | None = None
    store: StrictBool | None = None
    service_tier: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_retention: StrictStr | None = None
    prompt_cache_options: dict[str, Any] | None = None
    reasoning_effort: StrictStr | None = None
    verbosity: StrictStr | None = None
    prediction: dict[str, Any] | None = None


class _OneValue(_Model):
    """Keys of OpenAI's that are taken only with the one value that changes nothing."""

    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None


class ChatRequest(_Thinker, _WithoutEffect, _OneValue):
    """The body of `POST /v1/chat/completions`."""

    model: StrictStr
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    modalities: Annotated[list[StrictStr], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    audio: AudioOptions | None = None
    max_tokens: StrictInt | None = None
    max_completion_tokens: StrictInt | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    """Functions that the reply may call; the Triton server checks them."""
    tool_choice: StrictStr | dict[str, Any] | None = None
    """`auto`, `none`, `required`, or an object that names a function."""
    parallel_tool_calls: StrictBool | None = None
    seed: StrictInt | None = None
    prompt_cache_key: StrictStr | None = None
    """Requests of one caller with the same key share what the server kept of their prompts."""
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    # Extensions of OpenAI's API; its client sends them by `extra_body`.
    ignore_eos: StrictBool | None = None
    use_audio_in_video: StrictBool | None = None
    mm_processor_kwargs: MediaOptions | None = None
    talker: dict[str, Any] | None = None
    token2wav: dict[str, Any] | None = None
    priority: StrictInt | None = None
    cache: StrictBool | None = None
    prefill_only: StrictBool | None = None
    """True: the prompt enters the caches, and the reply is empty."""
    audio_in_pieces: StrictBool | None = None
    timeout: Seconds | None = None

    @property
    def wants_audio(self) -> bool:
        """True if the reply is spoken."""
        return "audio" in (self.modalities or ())

    @property
    def length_key(self) -> str:
        """Under which of its two names the reply's longest length was given."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def thinker(self) -> dict[str, Any]:
        """The `thinker` object of the request to the server: what was given, under the server's names."""
        given = {name: getattr(self, name) for name in _Thinker.model_fields}
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if isinstance(self.stop, str):
            given["stop"] = [self.stop]
        if self.ignore_eos:
            given["min_tokens"] = limit
        given["json_schema"] = self.response_format.to_schema() if self.response_format else None
        return {name: value for name, value in {**given, "max_tokens": limit}.items() if value is not None}


class SpeechRequest(_Model):
    """The body of `POST /v1/audio/speech`."""

    model: StrictStr
    input: Annotated[StrictStr, Field(min_length=1)]
    voice: StrictStr | None = None
    instructions: StrictStr | None = None
    """How to read; goes in front of the prompt."""
    response_format: StrictStr | None = None
    """`mp3` (where none is given), `opus`, `aac`, `flac`, `wav` or `pcm`."""
    speed: Annotated[float, Field(allow_inf_nan=False, strict=True, ge=SLOWEST, le=FASTEST)] | None = None
    """Of the speech; its pitch stays."""
    stream_format: Literal["audio", "sse"] | None = None
    # Extensions of OpenAI's API.
    seed: StrictInt | None = None
    talker: dict[str, Any] | None = None
    token2wav: dict[str, Any] | None = None
    timeout: Seconds | None = None


Schema = TypeVar("Schema", bound=BaseModel)


def parse(schema: type[Schema], body: bytes) -> Schema:
    """A body as one of the types above.

    Raises:
        GatewayError: 400; the message names the key, the value and what is allowed, and `param` is the key.
    """
    check_json(body)
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False, include_context=False)) from error


def refusal(problems: list[ErrorDetails]) -> GatewayError:
    """The refusal of the first key at fault; of a union's branches, the one that was followed farthest."""
    of_key = [found for found in problems if found["loc"][:1] == problems[0]["loc"][:1]]
    problem = max(of_key, key=lambda found: len(found["loc"]))
    param = _path(problem["loc"], own_key=problem["type"] == "extra_forbidden")
    match problem["type"]:
        case "json_invalid":
            said = problem["msg"].removeprefix("Invalid JSON: ")
            return bad_request(f"The body is not JSON: {said}.", code="invalid_json")
        case "model_type" if not problem["loc"]:
            return bad_request("The body is JSON, but no object.", code="invalid_value")
        case "extra_forbidden":
            return bad_request(f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
        case "missing":
            said = f"Missing required parameter: '{param}'."
            return bad_request(said, param=param, code="missing_required_parameter")
    said = problem["msg"].removeprefix("Value error, ").replace(" after validation", "")
    if said.startswith("Input "):
        # Written as in JSON; no allowed word of a key is written like this.
        said = _shown(problem["input"]) + said.removeprefix("Input").replace(" False", " false")
    return bad_request(f"Invalid value for '{param}': {said}.", param=param, code="invalid_value")


def _shown(value: object) -> str:
    """A value of a body, in a sentence: a short one as it came."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    written = json.dumps(value, default=lambda _: "a file")
    return written if len(written) <= _SHOWN_VALUE else f"{written[:_SHOWN_VALUE]}..."


def _path(steps: tuple[int | str, ...], *, own_key: bool) -> str:
    """Return a path such as `messages[0].content`, with long keys cut. Names of a union's branches are left out; a
    caller's own key as last step stays.
    """
    path = ""
    for place, step in enumerate(steps, 1):
        if isinstance(step, int):
            path += f"[{step}]"
        elif (own_key and place == len(steps)) or step.isdigit() or (step.isidentifier() and step != "str"):
            path += f".{step}" if path else step
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in path)[:_SHOWN]
