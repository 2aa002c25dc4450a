# SPDX-License-Identifier: Apache-2.0
"""OpenAI's requests to requests of Triton's client. Pure: no socket, no clock, and nothing is fetched.

Media stay in the messages as they came (`data:` URIs and base64); the server decodes them under its own limits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, cast, get_args

from triton_omni_client import Request
from triton_omni_client.messages import Modality

from .errors import GatewayError, bad_request
from .field_names import MEDIA_VALUES
from .schemas import AudioOptions, ChatRequest, Message, SpeechRequest
from .settings import ANY_END, TEXT_MARK
from .sound import SoundFormat

FindTranscript = Callable[[str], str | None]

_SPEECH_FORMATS: Mapping[str, SoundFormat] = {
    "mp3": "mp3",
    "opus": "opus",
    "aac": "aac",
    "flac": "flac",
    "wav": "wav",
    "pcm": "pcm16",
}
_DATA_URI_BEGIN = 16
_DETAILS = ("auto", "low", "high")
_PART_TYPES = ("text", *MEDIA_VALUES)
"""The server's other ones take media that are sent beside the messages, for which HTTP has no place."""


def served_model(name: str, served: tuple[str, ...]) -> str:
    """The name by which an answer tells its model.

    Args:
        name: what the caller asks for.
        served: names of the model; see `GatewaySettings.models`.

    Returns:
        `name` where it is one of them, the first of them where it only begins like one.

    Raises:
        GatewayError: 404, with the names there are.
    """
    if name in served and not name.endswith(ANY_END):
        return name
    if name.startswith(tuple(begin.removesuffix(ANY_END) for begin in served if begin.endswith(ANY_END))):
        return served[0]
    said = f"The model {name[:80]!a} does not exist; this gateway serves: {', '.join(served)}."
    raise GatewayError(404, said, code="model_not_found", param="model")


def check_priority(asked: int | None, least: int) -> None:
    """Refuse a place in front of others that this gateway does not give.

    Raises:
        GatewayError: 400, with the lowest number there is.
    """
    if asked is not None and asked < least:
        said = f"Invalid value for 'priority': {asked} is under {least}, the lowest that this gateway allows."
        raise bad_request(said, param="priority", code="invalid_value")


def cache_salt(caller: str, cache_key: str | None) -> str | None:
    """Return the salt under which a request shares the server's caches; None = with no other request.

    Args:
        caller: digest of the API key, empty where callers have none.
        cache_key: the request's `prompt_cache_key`.
    """
    if not caller and not cache_key:
        return None
    return hashlib.sha256(json.dumps([caller, cache_key]).encode()).hexdigest()


def chat_request(chat: ChatRequest, find: FindTranscript, request_id: str, caller: str = "") -> Request:
    """Build the server's request for a chat.

    Args:
        chat: the caller's request.
        find: the text of an earlier spoken reply by its id, or None.
        request_id: a label for logs.
        caller: see `cache_salt`.

    Raises:
        GatewayError: 400, a combination that makes no sense.
    """
    _check_lengths(chat)
    salt = cache_salt(caller, chat.prompt_cache_key)
    if chat.prefill_only and (salt is None or chat.cache is False):
        said = (
            "needs an API key or 'prompt_cache_key', and a 'cache' that is not false: no request could find the prompt"
        )
        raise bad_request(f"'prefill_only' {said}.", param="prefill_only")
    media = {} if chat.mm_processor_kwargs is None else chat.mm_processor_kwargs.model_dump(exclude_none=True)
    in_video = media.pop("use_audio_in_video", None)
    return Request(
        messages=[_message(message, index, find) for index, message in enumerate(chat.messages)],
        modalities=_modalities(chat),
        voice=None if chat.audio is None else chat.audio.voice,
        seed=chat.seed,
        use_audio_in_video=in_video if chat.use_audio_in_video is None else chat.use_audio_in_video,
        mm_processor_kwargs=media,
        thinker=chat.thinker(),
        talker=chat.talker or {},
        token2wav=chat.token2wav or {},
        priority=chat.priority,
        cache_salt=salt,
        cache=chat.cache,
        tools=chat.tools or None,
        tool_choice=chat.tool_choice,
        parallel_tool_calls=chat.parallel_tool_calls,
        prefill_only=chat.prefill_only,
        audio_in_pieces=chat.audio_in_pieces,
        timeout=chat.timeout,
        request_id=request_id,
    )


def _modalities(chat: ChatRequest) -> tuple[Modality, ...]:
    """Return the requested modalities; text alone by default, as at OpenAI."""
    known = get_args(Modality)
    asked = chat.modalities or ["text"]
    for modality in asked:
        if modality not in known:
            said = f"Invalid value for 'modalities': {modality[:80]!a} is none of {', '.join(known)}."
            raise bad_request(said, param="modalities", code="invalid_value")
    if chat.audio is not None and not chat.wants_audio:
        raise bad_request("'audio' is given, but 'modalities' does not hold \"audio\".", param="audio")
    return cast(tuple[Modality, ...], tuple(asked))


def _check_lengths(chat: ChatRequest) -> None:
    limits = (chat.max_tokens, chat.max_completion_tokens)
    if None not in limits and limits[0] != limits[1]:
        raise bad_request("'max_tokens' and 'max_completion_tokens' differ; give one.", param="max_tokens")
    if chat.ignore_eos and limits == (None, None):
        raise bad_request("'ignore_eos' needs 'max_completion_tokens'.", param="ignore_eos")
    if chat.ignore_eos and chat.tools:
        said = "'ignore_eos' cannot be given with 'tools', whose calls say when the reply may end."
        raise bad_request(said, param="ignore_eos")
    if chat.ignore_eos and chat.response_format is not None and chat.response_format.type != "text":
        said = "'ignore_eos' cannot be given with a 'response_format' of JSON, which says when the reply may end."
        raise bad_request(said, param="ignore_eos")


def _message(message: Message, index: int, find: FindTranscript) -> dict[str, Any]:
    named = {"tool_calls": message.tool_calls or None, "tool_call_id": message.tool_call_id}
    told = {name: value for name, value in named.items() if value is not None}
    return {"role": "system" if message.role == "developer" else message.role, **told, **_content(message, index, find)}


def _content(message: Message, index: int, find: FindTranscript) -> dict[str, Any]:
    if message.audio is not None:
        return {"content": _spoken(message, f"messages[{index}].audio", find)}
    if message.content is None and message.role in ("assistant", "tool"):
        return {}
    if message.content is None:
        said = f"Missing required parameter: 'messages[{index}].content'."
        raise bad_request(said, param=f"messages[{index}].content", code="missing_required_parameter")
    if isinstance(message.content, str):
        return {"content": message.content}
    parts = [_part(part, f"messages[{index}].content[{place}]") for place, part in enumerate(message.content)]
    return {"content": parts}


def _spoken(message: Message, path: str, find: FindTranscript) -> str:
    """The text of an earlier reply: what was kept, or what the caller sent back of it."""
    if message.role != "assistant" or message.audio is None:
        raise bad_request(f"'{path}' is for messages of the assistant.", param=path)
    audio_id, said = message.audio.get("id"), message.audio.get("transcript")
    kept = find(audio_id) if isinstance(audio_id, str) else None
    if kept is not None:
        return kept
    if isinstance(said, str):
        return said
    reason = f"'{path}.id': no such audio, or it has expired; send 'content' or 'audio.transcript' instead."
    raise bad_request(reason, param=f"{path}.id", code="audio_not_found")


def _part(part: dict[str, Any], path: str) -> dict[str, Any]:
    """A part with plain base64, and without OpenAI's choice of a resolution, which this model does not have."""
    if (kind := part.get("type")) not in _PART_TYPES:
        got = f" (got {kind[:80]!a})" if isinstance(kind, str) else ""
        said = f"Invalid value for '{path}.type': it must be one of {', '.join(_PART_TYPES)}{got}."
        raise bad_request(said, param=f"{path}.type", code="invalid_value")
    image, sound = part.get("image_url"), part.get("input_audio")
    if isinstance(image, dict) and image.get("detail") in _DETAILS:
        return {**part, "image_url": {name: value for name, value in image.items() if name != "detail"}}
    if isinstance(sound, dict) and isinstance(data := sound.get("data"), str):
        return {**part, "input_audio": {**sound, "data": plain_base64(data)}}
    return part


def plain_base64(data: str) -> str:
    """Base64 without the beginning of a data URI and without line breaks, which programs send for it."""
    if data[:_DATA_URI_BEGIN].lstrip().lower().startswith("data:"):
        data = data.partition(",")[2]
    return "".join(data.split())


def chat_format(options: AudioOptions | None, *, stream: bool) -> SoundFormat:
    """How a chat's speech is encoded.

    Raises:
        GatewayError: 400, with the formats there are.
    """
    asked = None if options is None else options.format
    if asked is None:
        return "pcm16" if stream else "wav"
    known = get_args(SoundFormat)
    if asked not in known:
        raise _no_format("audio.format", asked, known)
    return cast(SoundFormat, asked)


def speech_format(asked: str | None) -> SoundFormat:
    """How speech is encoded.

    Raises:
        GatewayError: 400, with the formats there are.
    """
    found = _SPEECH_FORMATS.get(asked or "mp3")
    if found is None:
        raise _no_format("response_format", str(asked), tuple(_SPEECH_FORMATS))
    return found


def _no_format(param: str, asked: str, known: tuple[str, ...]) -> GatewayError:
    said = f"Invalid value for '{param}': {asked[:80]!a} is not offered; the formats are {', '.join(known)}."
    return bad_request(said, param=param, code="unsupported_format")


def speech_request(speech: SpeechRequest, prompt: str, request_id: str) -> Request:
    """Build the server's request that reads a text aloud.

    Args:
        speech: the caller's request.
        prompt: the deployment's prompt, with the mark of the text's place.
        request_id: a label for logs.
    """
    text = prompt.replace(TEXT_MARK, speech.input)
    return Request(
        text=f"{speech.instructions}\n\n{text}" if speech.instructions else text,
        voice=speech.voice,
        seed=speech.seed,
        talker=speech.talker or {},
        token2wav=speech.token2wav or {},
        timeout=speech.timeout,
        request_id=request_id,
    )
