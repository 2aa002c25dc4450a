# SPDX-License-Identifier: Apache-2.0
"""The fields of a request as its caller wrote them, for refusals in which the server names them in its own words.

The tables below are all there is to know of both; a name that is in neither is left as it is. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import CONTEXT_LENGTH, Refusal
from .schemas import ChatRequest

_BOTH: Mapping[str, str] = {
    "sampling_parameters": "",
    "sampling_parameters.thinker": "",
    # A later stage names a key without its path.
    "seed": "seed",
    "preset": "token2wav.preset",
    "solver": "token2wav.solver",
    "num_steps": "token2wav.num_steps",
    "guidance_scale": "token2wav.guidance_scale",
}
"""The server's paths and the caller's; empty: what follows is the caller's. The longest that fits counts."""
_CHAT: Mapping[str, str] = {
    **_BOTH,
    "messages": "messages",
    "tools": "tools",
    "voice": "audio.voice",
    "sampling_parameters.voice": "audio.voice",
}
_SPEECH: Mapping[str, str] = {**_BOTH, "text_input": "input", "voice": "voice"}
MEDIA_VALUES: Mapping[str, str] = {
    "image_url": "url",
    "input_audio": "data",
    "audio_url": "url",
    "video_url": "url",
}
"""Where the parts of each type have their medium."""

_PATH = re.compile(
    r"""(?P<plain>[a-z]\w*+(?:\.\w++|\[\d++\])*+)"""
    r"""(?P<quoted>(?:\.(?:'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+")(?:\.\.\.)?|\.\w++|\[\d++\])*+)(?=: )""",
    re.ASCII,
)
"""A path of keys and places in front of a refusal, and what of it comes after a key that is no plain name."""
_MEDIUM = re.compile(r"medium (?P<index>\d+) \([a-z]+\)(?=: )")
_SIBLING = re.compile(r"^: (?P<said>-?\d+ is over|must be 0 beside) (?P<key>max_tokens|json_schema)\b")
"""Where a refusal names a second key of the same object."""
_TOO_LONG = re.compile(r"the prompt has \d+ tokens\b")
"""With what every stage begins that has no room for a prompt, or for it and the reply that was asked for."""
_SYSTEM = re.compile(r"(?<=\(got )system(?=\)$)")


@dataclass(frozen=True)
class FieldNames:
    """Names that the caller of one request used for its fields."""

    table: Mapping[str, str]
    """The server's paths and the caller's."""
    prompt: str
    """Name of the prompt's field."""
    rest: str
    """Name for faults of no single key: all keys that the server takes together."""
    media: tuple[str, ...] = ()
    """Where each medium is, in their order."""
    developers: frozenset[str] = frozenset()
    """Messages of the role `developer`, which the server knows as `system`."""

    def told(self, message: str) -> Refusal:
        """A refusal in the caller's words, with the key at fault where it is one that the caller wrote."""
        if _TOO_LONG.match(message):
            return Refusal(f"{self.prompt}: {message}", self.prompt, CONTEXT_LENGTH)
        medium = _MEDIUM.match(message)
        if medium is not None and int(medium["index"]) < len(self.media):
            name = self.media[int(medium["index"])]
            return Refusal(name + message[medium.end() :], name)
        found = _PATH.match(message)
        named = None if found is None else self._name(found["plain"])
        if found is None or named is None:
            return Refusal(message)
        tail = self._tail(found["plain"], message[found.end() :])
        return Refusal(f"{named or self.rest}{found['quoted']}{tail}", named or None)

    def _name(self, path: str) -> str | None:
        """The caller's path; empty for the whole of the server's parameters, None where the path is in no table."""
        known = [key for key in self.table if path.startswith(key) and path[len(key) : len(key) + 1] in ("", ".", "[")]
        if not known:
            return None
        key = max(known, key=len)
        return (self.table[key] + path[len(key) :]).removeprefix(".")

    def _tail(self, path: str, tail: str) -> str:
        if path.partition(".")[0] in self.developers:
            return _SYSTEM.sub("developer", tail)
        if (found := _SIBLING.search(tail)) is None:
            return tail
        sibling = self._name(f"{path.rpartition('.')[0]}.{found['key']}")
        return f": {found['said']} {sibling}{tail[found.end() :]}"


SPEECH_NAMES = FieldNames(_SPEECH, "input", "the request without its 'input'")
"""Names of speech requests, whose fields have one spelling each."""

RECORDING_NAMES = FieldNames(
    {**_BOTH, "messages": "prompt", "messages[0].content[1].text": "prompt"}, "prompt", "the request", ("file",)
)
"""Names of requests to write down or translate what is said."""


def chat_names(chat: ChatRequest) -> FieldNames:
    """Return the names that the caller of a chat used; some fields have several spellings."""
    schema, heard = "response_format", "use_audio_in_video"
    if chat.response_format is not None and chat.response_format.json_schema is not None:
        schema = "response_format.json_schema.schema"
    if chat.use_audio_in_video is None:
        heard = "mm_processor_kwargs.use_audio_in_video"
    spelled = {
        "sampling_parameters.thinker.max_tokens": chat.length_key,
        "sampling_parameters.thinker.json_schema": schema,
        "thinker.json_schema": schema,
        "use_audio_in_video": heard,
    }
    if isinstance(chat.stop, str):
        spelled["sampling_parameters.thinker.stop[0]"] = "stop"
    developers = (f"messages[{at}]" for at, message in enumerate(chat.messages) if message.role == "developer")
    rest = "the request without its 'messages'"
    return FieldNames({**_CHAT, **spelled}, "messages", rest, _media_paths(chat), frozenset(developers))


def _media_paths(chat: ChatRequest) -> tuple[str, ...]:
    return tuple(
        f"messages[{at}].content[{place}].{kind}.{MEDIA_VALUES[kind]}"
        for at, message in enumerate(chat.messages)
        if isinstance(message.content, list) and message.audio is None
        for place, part in enumerate(message.content)
        if isinstance(kind := part.get("type"), str) and kind in MEDIA_VALUES
    )
