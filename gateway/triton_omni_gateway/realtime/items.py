# SPDX-License-Identifier: Apache-2.0
"""The items of a conversation: what was said, heard and shown, in order, and what the model is told of it. Pure."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, cast

from triton_omni_client import Media, heard_text
from triton_omni_client.conversation import user_message
from triton_omni_gateway.errors import GatewayError, bad_request
from triton_omni_gateway.replies import to_base64
from triton_omni_gateway.translate import plain_base64

from .calls import CallItem, OutputItem, made_call, needed
from .config import Json, SoundFormat
from .events import ROOT, GivenItem, Part, new_id
from .formats import BYTES_A_MS, SHORTEST_MS, InputDecoder, encoded_input, heard_wav
from .limits import RealtimeLimits

Role = Literal["system", "user", "assistant"]
Status = Literal["in_progress", "completed", "incomplete"]
_SHOWN = 80
_OF_ROLE = {
    "system": ("input_text", "text"),
    "user": ("input_text", "text", "input_audio", "input_image"),
    "assistant": ("output_text", "text", "output_audio"),
}
_VALUE = {"input_audio": "audio", "input_image": "image_url", "output_audio": "transcript"}
"""The key that has the value of a part; `text` has that of others."""
_MEDIA = ("input_audio", "input_image")
_TEXT_BYTES_A_TOKEN, _AUDIO_TOKENS_A_SECOND, _IMAGE_TOKENS, _ITEM_TOKENS = 3, 25, 1300, 5
"""For estimates of a prompt's length; an image has up to so many where it has a megapixel."""


@dataclass(eq=False)
class Content:
    """A part of an item."""

    kind: Literal["input_text", "input_audio", "input_image", "output_text", "output_audio"]
    text: str = ""
    """Written or spoken text; for `input_audio` the transcript, which the model does not see."""
    data: bytes = field(default=b"", repr=False)
    """PCM16 at 16 kHz of an `input_audio`, the file of an `input_image`."""
    seconds: float = 0.0
    """Length of an `output_audio`: how much speech was sent, or was heard where it was truncated."""
    mime: str = ""
    """Type of an `input_image`."""

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return len(self.text) + len(self.data)

    @property
    def tokens(self) -> float:
        """An estimate of its tokens in a prompt."""
        if self.kind == "input_audio":
            return len(self.data) / BYTES_A_MS / 1000 * _AUDIO_TOKENS_A_SECOND
        return _IMAGE_TOKENS if self.kind == "input_image" else len(self.text.encode()) / _TEXT_BYTES_A_TOKEN

    def told(self, sound_format: SoundFormat | None) -> Json:
        """The part as events show it; media only where the format of sound is given."""
        match self.kind:
            case "input_audio":
                sound = {} if sound_format is None else {"audio": to_base64(encoded_input(self.data, sound_format))}
                return {"type": self.kind, "transcript": self.text or None, **sound}
            case "input_image":
                url = None if sound_format is None else f"data:{self.mime};base64,{to_base64(self.data)}"
                return {"type": self.kind, "image_url": url, "detail": "auto"}
            case "output_audio":
                return {"type": self.kind, "transcript": self.text}
        return {"type": self.kind, "text": self.text}


@dataclass(eq=False)
class Item:
    """A message of a conversation."""

    role: Role
    content: list[Content]
    item_id: str = field(default_factory=lambda: new_id("item"))
    status: Status = "completed"

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return sum(part.size for part in self.content)

    @property
    def tokens(self) -> float:
        """An estimate of its tokens in a prompt."""
        return _ITEM_TOKENS + sum(part.tokens for part in self.content)

    def told(self, sound_format: SoundFormat | None = None) -> Json:
        """The item as events show it; media only where the format of sound is given."""
        content = [part.told(sound_format) for part in self.content]
        head = {"id": self.item_id, "object": "realtime.item", "type": "message", "status": self.status}
        return {**head, "role": self.role, "content": content}

    def message(self) -> Json | None:
        """The item as a message of a chat, whose parts of media take the next ones of `media`; None where empty."""
        text = "\n".join(part.text for part in self.content if part.text and part.kind != "input_audio")
        if self.role != "user":
            return {"role": self.role, "content": text} if text else None
        media = self.media()
        return user_message(text, media) if text or media else None

    def media(self) -> list[Media]:
        """Its sounds and pictures, in order."""
        return [
            Media("audio", heard_wav(part.data)) if part.kind == "input_audio" else Media("image", part.data)
            for part in self.content
            if part.kind in _MEDIA
        ]

    def truncate(self, index: int, heard_ms: int) -> None:
        """Keep what was heard of a spoken reply.

        Raises:
            GatewayError: 400, it is no spoken reply, or so much of it was never sent.
        """
        if self.role != "assistant":
            raise bad_request(f"'item_id' names a message of the {self.role}: only the assistant's are truncated.")
        if index >= len(self.content) or self.content[index].kind != "output_audio":
            said = f"Invalid value for 'content_index': the item has no speech at {index}; speech is at 0."
            raise bad_request(said, param="content_index", code="invalid_value")
        part = self.content[index]
        longest = math.ceil(part.seconds * 1000)
        if heard_ms > longest:
            said = f"Invalid value for 'audio_end_ms': {heard_ms} is over {longest}, the length of the speech."
            raise bad_request(said, param="audio_end_ms", code="invalid_value")
        total = part.seconds if self.status == "completed" else None
        part.seconds, self.status = heard_ms / 1000, "incomplete"
        part.text = heard_text(part.text, part.seconds, total)


AnyItem = Item | CallItem | OutputItem


class Items:
    """A conversation.

    Args:
        limits: how long it may be; more makes the oldest items go.
    """

    def __init__(self, limits: RealtimeLimits) -> None:
        self._limits = limits
        self._items: list[AnyItem] = []

    def __iter__(self) -> Iterator[AnyItem]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def last_id(self) -> str | None:
        """Id of the newest item."""
        return self._items[-1].item_id if self._items else None

    @property
    def tokens(self) -> float:
        """An estimate of the tokens of all."""
        return sum(item.tokens for item in self._items)

    def find(self, item_id: str, param: str = "item_id") -> AnyItem:
        """Return an item.

        Raises:
            GatewayError: 404, there is none of this id.
        """
        for item in self._items:
            if item.item_id == item_id:
                return item
        said = f"Invalid value for '{param}': the conversation has no item {item_id[:_SHOWN]!a}."
        raise GatewayError(404, said, code="item_not_found", param=param)

    def before(self, item: AnyItem) -> str | None:
        """Id of the item that precedes this one."""
        place = self._items.index(item)
        return self._items[place - 1].item_id if place else None

    def put(self, item: AnyItem, after: str | None = None) -> None:
        """Add an item at the end, after another one, or in front of all (`root`).

        Raises:
            GatewayError: 400 or 404, the id is taken, or there is no such place.
        """
        if any(other.item_id == item.item_id for other in self._items):
            said = f"Invalid value for 'item.id': the conversation has {item.item_id[:_SHOWN]!a} already."
            raise bad_request(said, param="item.id", code="invalid_value")
        if after is None:
            self._items.append(item)
        elif after == ROOT:
            self._items.insert(0, item)
        else:
            self._items.insert(self._items.index(self.find(after, "previous_item_id")) + 1, item)

    def remove(self, item: AnyItem) -> None:
        """Take an item out."""
        self._items.remove(item)

    def over_size(self) -> list[AnyItem]:
        """Return the oldest items, without which the conversation is within its bounds; the newest one stays."""
        size, gone = sum(item.size for item in self._items), 0
        limits = self._limits
        while gone < len(self._items) - 1 and (
            size > limits.max_conversation_bytes or len(self._items) - gone > limits.max_items
        ):
            size -= self._items[gone].size
            gone += 1
        return self._items[:gone]

    def over_tokens(self, limit: float, keep: float) -> list[AnyItem]:
        """Return the oldest items, which go where the conversation has over `limit` tokens, until `keep` are left."""
        tokens, gone = self.tokens, 0
        if tokens <= limit:
            return []
        while gone < len(self._items) - 1 and tokens > keep:
            tokens -= self._items[gone].tokens
            gone += 1
        return self._items[:gone]


def messages_of(items: Iterable[AnyItem], instructions: str | None) -> tuple[list[Json], list[Media]]:
    """Return the chat that the model is told, and its media. Calls belong to the assistant's message before them."""
    messages: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    media: list[Media] = []
    for item in items:
        match item:
            case CallItem():
                if item.status == "completed":
                    _caller(messages).setdefault("tool_calls", []).append(item.called())
            case OutputItem():
                messages.append(item.message())
            case Item() if (message := item.message()) is not None:
                messages.append(message)
                media += item.media()
    return messages, media


def media_names(items: Iterable[AnyItem]) -> tuple[str, ...]:
    """Name each medium of `messages_of` by its item and its place in it."""
    return tuple(
        f"{item.item_id}.content[{place}]"
        for item in items
        if isinstance(item, Item)
        for place, part in enumerate(item.content)
        if part.kind in _MEDIA
    )


def _caller(messages: list[Json]) -> Json:
    """The assistant's message at the end, which is made where there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def made_item(given: GivenItem, decoder: InputDecoder, path: str) -> AnyItem:
    """An item as its client gave it at a path of an event.

    Raises:
        GatewayError: 400, with the key at fault.
    """
    if given.type in ("function_call", "function_call_output"):
        return made_call(given, path)
    if given.type != "message":
        said = f"Invalid value for '{path}.type': {given.type!a} belongs into the 'input' of a response."
        raise bad_request(said, param=f"{path}.type", code="invalid_value")
    asked = needed(given, "role", path)
    role = cast(Role, "system" if asked == "developer" else asked)
    if not given.content and role != "assistant":
        said = f"Missing required parameter: '{path}.content': a message has at least one part."
        raise bad_request(said, param=f"{path}.content", code="missing_required_parameter")
    content = [_content(part, role, f"{path}.content[{place}]", decoder) for place, part in enumerate(given.content)]
    return Item(role, content, given.id or new_id("item"))


def _content(part: Part, role: Role, path: str, decoder: InputDecoder) -> Content:
    if part.type not in _OF_ROLE[role]:
        allowed = ", ".join(_OF_ROLE[role])
        said = f"Invalid value for '{path}.type': {part.type!a}; a message of the {role} has {allowed}."
        raise bad_request(said, param=f"{path}.type", code="invalid_value")
    key = _VALUE.get(part.type, "text")
    value = getattr(part, key)
    if value is None:
        said = f"Missing required parameter: '{path}.{key}'."
        raise bad_request(said, param=f"{path}.{key}", code="missing_required_parameter")
    if part.type == "input_audio":
        sound = decoded_base64(value, f"{path}.audio")
        pcm = decoder.decode(sound) + decoder.end()
        if len(pcm) < SHORTEST_MS * BYTES_A_MS:
            said = f"Invalid value for '{path}.audio': {len(pcm) // BYTES_A_MS} ms of sound; at least {SHORTEST_MS} ms."
            raise bad_request(said, param=f"{path}.audio", code="invalid_value")
        return Content("input_audio", part.transcript or "", pcm)
    if part.type == "input_image":
        return _image(value, f"{path}.image_url")
    # An earlier spoken reply is its text: the model reads earlier replies.
    return Content("output_text" if role == "assistant" else "input_text", value)


def _image(url: str, path: str) -> Content:
    head, comma, data = url.partition(",")
    if not comma or not head.lower().startswith("data:") or not head.lower().endswith(";base64"):
        said = f"Invalid value for '{path}': a picture is data:image/png;base64,…; no address is fetched."
        raise bad_request(said, param=path, code="invalid_value")
    return Content("input_image", data=decoded_base64(data, path), mime=head[len("data:") : -len(";base64")][:_SHOWN])


def decoded_base64(text: str, path: str) -> bytes:
    """The bytes of a text in base64, of a data URI, or with line breaks.

    Raises:
        GatewayError: 400, it is none.
    """
    try:
        return base64.b64decode(plain_base64(text), validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_request(
            f"Invalid value for '{path}': not base64: {error}.", param=path, code="invalid_value"
        ) from error
