# SPDX-License-Identifier: Apache-2.0
"""Replies of the server in OpenAI's words: completions, chunks of them, events of speech. Pure but for the clock.

A spoken reply's text is the transcript of its audio, and `content` stays null, as OpenAI's audio models have it.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from triton_omni_client import AudioDelta, Delta, Info, Reply, TextDelta, ToolCallDelta

from .sound import SoundEncoder, SoundFormat, encode_whole
from .tools import call_chunk, called

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"


def event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event, in ASCII: some clients end a line at any of Unicode's line breaks."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def to_base64(data: bytes) -> str:
    """Bytes as base64 text."""
    return base64.b64encode(data).decode("ascii")


@dataclass(frozen=True)
class Spoken:
    """The audio of one reply: its id, when that is forgotten (seconds since the epoch), its encoding."""

    audio_id: str
    expires_at: int
    sound_format: SoundFormat


@dataclass(frozen=True)
class Head:
    """Fields that all parts of one completion share."""

    completion_id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def of(self, kind: str, choices: list[Json]) -> Json:
        """An object of this kind."""
        return {
            "id": self.completion_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def completion(head: Head, reply: Reply, spoken: Spoken | None) -> Json:
    """A whole `chat.completion`; `info` is the server's account, with the seed that repeats the reply. A reply of calls
    alone has neither content nor audio.
    """
    message: Json = {"role": "assistant", "content": reply.text, "refusal": None, "annotations": []}
    if reply.tool_calls:
        message["tool_calls"] = [called(call) for call in reply.tool_calls]
        message["content"] = reply.text or None
    if spoken is not None and (reply.text or not reply.tool_calls):
        message["content"] = None
        message["audio"] = {
            "id": spoken.audio_id,
            "data": to_base64(encode_whole(spoken.sound_format, reply.audio)),
            "expires_at": spoken.expires_at,
            "transcript": reply.text,
        }
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(reply.info)}
    return {**head.of("chat.completion", [choice]), "usage": usage(reply.info), "info": account(reply.info)}


class ChatChunks:
    """The `chat.completion.chunk` events of one streamed reply.

    Args:
        head: what all chunks say.
        spoken: the reply's audio; None = text alone.
        include_usage: whether the last event tells the usage.
    """

    def __init__(self, head: Head, spoken: Spoken | None, *, include_usage: bool) -> None:
        self._head = head
        self._spoken = spoken
        self._include_usage = include_usage
        self._encoder = None if spoken is None else SoundEncoder(spoken.sound_format)
        self._texts: list[str] = []
        self.info: Info | None = None
        """The server's account, once it came."""
        self._named = False
        self._calls = False

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._texts)

    def begin(self) -> bytes:
        """The first event: who speaks."""
        content = {"content": ""} if self._spoken is None else {"content": None}
        return self._chunk({"role": "assistant", **content, "refusal": None})

    def feed(self, delta: Delta) -> Iterator[bytes]:
        """The events of one delta; none for the server's account, which the end tells."""
        match delta:
            case TextDelta():
                self._texts.append(delta.text)
                text = delta.text
                yield self._chunk({"content": text} if self._spoken is None else self._audio(transcript=text))
            case AudioDelta() if self._encoder is not None:
                if data := self._encoder.feed(delta.samples):
                    yield self._chunk(self._audio(data=to_base64(data)))
            case ToolCallDelta():
                self._calls = True
                yield self._chunk({"tool_calls": [call_chunk(delta)]})
            case Info():
                self.info = delta

    def end(self) -> Iterator[bytes]:
        """The last events, and the mark of the end."""
        is_silent = self._calls and not self._named
        if self._spoken is not None and self._encoder is not None and not is_silent:
            if rest := self._encoder.end():
                yield self._chunk(self._audio(data=to_base64(rest)))
            yield self._chunk(self._audio(expires_at=self._spoken.expires_at))
        yield self._chunk({}, finish_reason(self.info), info=account(self.info))
        if self._include_usage:
            yield event({**self._head.of("chat.completion.chunk", []), "usage": usage(self.info)})
        yield DONE

    def _audio(self, **part: Any) -> Json:
        """A delta of audio; the first one names it, all others continue it."""
        name = {} if self._named or self._spoken is None else {"id": self._spoken.audio_id}
        self._named = True
        return {"audio": {**name, **part}}

    def _chunk(self, delta: Json, finish: str | None = None, **extra: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        chunk = self._head.of("chat.completion.chunk", [choice])
        return event({**chunk, **({"usage": None} if self._include_usage else {}), **extra})


def speech_delta(data: bytes) -> bytes:
    """The event of one chunk of speech, base64."""
    return event({"type": "speech.audio.delta", "audio": to_base64(data)})


def speech_done(info: Info | None, seed: int) -> bytes:
    """The event that ends a stream of speech; `finish_reason`, and `seed`, which repeats it, are not OpenAI's."""
    told = token_counts(info)
    return event({"type": "speech.audio.done", "usage": told, "finish_reason": finish_reason(info), "seed": seed})


def account(info: Info | None) -> Json | None:
    """The server's account of a reply as it gave it; None where it gave none."""
    return None if info is None else dict(info.raw)


def finish_reason(info: Info | None) -> str:
    """`tool_calls` where functions are called, `length` where a limit cut off the text or the speech, else `stop`."""
    reasons = {} if info is None else info.finish_reason
    if reasons.get("thinker") == "tool_calls":
        return "tool_calls"
    return "length" if "length" in (reasons.get("thinker"), reasons.get("talker")) else "stop"


def usage(info: Info | None) -> Json:
    """OpenAI's usage: codec codes are the reply's audio tokens, and completion tokens hold both kinds."""
    prompt = (info and info.prompt_tokens) or 0
    text = (info and info.reply_tokens) or 0
    audio = (info and info.codes) or 0
    return {
        "prompt_tokens": prompt,
        "prompt_tokens_details": {"cached_tokens": 0, **(info.prompt_tokens_details if info else {})},
        "completion_tokens": text + audio,
        "total_tokens": prompt + text + audio,
        "completion_tokens_details": {"text_tokens": text, "audio_tokens": audio, "reasoning_tokens": 0},
    }


def token_counts(info: Info | None) -> Json:
    """The counts of `usage`, by the names of OpenAI's audio and realtime APIs."""
    found = usage(info)
    counts = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens", "total_tokens": "total_tokens"}
    return {name: found[ours] for name, ours in counts.items()}
