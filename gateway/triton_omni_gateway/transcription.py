# SPDX-License-Identifier: Apache-2.0
"""Requests to the thinker that write speech down, and answers in OpenAI's words. Pure.

The thinker alone does it: it hears a sound beside a prompt that asks for its words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from triton_omni_client import Info, Request

from .replies import event

Json = dict[str, Any]
Task = Literal["transcribe", "translate"]


def listening_request(
    sound: bytes,
    prompt: str,
    request_id: str,
    *,
    temperature: float | None = None,
    priority: int | None = None,
) -> Request:
    """Build the server's request for the words of a sound.

    Args:
        sound: an encoded file of one window.
        prompt: what to do with it, such as `GatewaySettings.transcription_prompt`.
        request_id: a label for logs.
        temperature: of the thinker; None = greedy.
        priority: the lower, the sooner; None = the server's 0.
    """
    content = [{"type": "audio"}, {"type": "text", "text": prompt}]
    return Request(
        messages=[{"role": "user", "content": content}],
        media=[sound],
        modalities=("text",),
        thinker={} if temperature is None else {"temperature": temperature},
        priority=priority,
        request_id=request_id,
    )


@dataclass(frozen=True)
class Segment:
    """The words of one window of a recording."""

    begin: float
    """Seconds from the recording's begin, as `end`."""
    end: float
    text: str
    info: Info | None
    """The server's account."""


def text_of(segments: Sequence[Segment]) -> str:
    """All that was said."""
    return "".join(segment.text for segment in segments)


def whole(segments: Sequence[Segment]) -> Json:
    """The answer `json`."""
    return {"text": text_of(segments), "usage": usage(segments)}


def verbose(segments: Sequence[Segment], task: Task, language: str | None, temperature: float | None) -> Json:
    """The answer `verbose_json`; the model tells neither the language nor how sure it is."""
    seconds = round(segments[-1].end, 3)
    told = [
        {
            "id": number,
            "seek": round(segment.begin * 100),
            "start": round(segment.begin, 3),
            "end": round(segment.end, 3),
            "text": segment.text,
            "tokens": [],
            "temperature": temperature or 0.0,
        }
        for number, segment in enumerate(segments)
    ]
    return {
        "task": task,
        "language": language,
        "duration": seconds,
        "text": text_of(segments),
        "segments": told,
        "usage": {"type": "duration", "seconds": seconds},
    }


def delta_event(text: str) -> bytes:
    """The event of a piece of the text."""
    return event({"type": "transcript.text.delta", "delta": text})


def done_event(segments: Sequence[Segment]) -> bytes:
    """The event that ends a stream."""
    return event({"type": "transcript.text.done", **whole(segments)})


def usage(segments: Sequence[Segment]) -> Json:
    """Tokens of all windows; the prompt is counted with each."""
    infos = [segment.info for segment in segments if segment.info is not None]
    given = sum(info.prompt_tokens or 0 for info in infos)
    written = sum(info.reply_tokens or 0 for info in infos)
    heard = sum(info.prompt_tokens_details.get("audio_tokens", 0) for info in infos)
    return {
        "type": "tokens",
        "input_tokens": given,
        "input_token_details": {"text_tokens": given - heard, "audio_tokens": heard},
        "output_tokens": written,
        "total_tokens": given + written,
    }
