# SPDX-License-Identifier: Apache-2.0
"""The events of clients as types, and the making of the server's. Pure but for the ids that are drawn.

A wrong event is refused by name, as a wrong request is, and the session goes on.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, StrictStr

from triton_omni_gateway.errors import GatewayError, bad_request
from triton_omni_gateway.schemas import MAX_ITEMS, parse, without_nulls

from .config import AnyConfig, Json, Modality, ResponseAudio, ResponseOptions, Strict

ROOT = "root"
"""`previous_item_id` of what goes in front of all items."""
_LONGEST_ID = 512
_SHOWN = 80
Id = Annotated[str, Field(strict=True, min_length=1, max_length=_LONGEST_ID)]
_Index = Annotated[int, Field(strict=True, ge=0)]


class ClientEvent(Strict):
    """An event of a client."""

    type: StrictStr
    event_id: Id | None = None


class SessionUpdate(ClientEvent):
    """Change the session."""

    session: AnyConfig


class BufferAppend(ClientEvent):
    """More sound, base64."""

    audio: StrictStr


class BufferCommit(ClientEvent):
    """The sound so far is what the user says."""


class BufferClear(ClientEvent):
    """Drop the sound so far."""


class Part(Strict):
    """A part of a message's content; which keys belong to a type is checked with the item."""

    type: Literal["input_text", "input_audio", "input_image", "output_text", "output_audio", "text"]
    text: StrictStr | None = None
    audio: StrictStr | None = None
    transcript: StrictStr | None = None
    image_url: StrictStr | None = None
    detail: Literal["auto", "low", "high"] | None = None


class GivenItem(Strict):
    """An item as a client gives it; `status` and `object` have no effect."""

    type: Literal["message", "function_call", "function_call_output", "item_reference"] = "message"
    id: Id | None = None
    object: StrictStr | None = None
    status: StrictStr | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Annotated[tuple[Part, ...], Field(max_length=MAX_ITEMS)] = ()
    call_id: StrictStr | None = None
    name: StrictStr | None = None
    arguments: StrictStr | None = None
    output: StrictStr | None = None
    phase: StrictStr | None = None


class ItemCreate(ClientEvent):
    """Put an item into the conversation."""

    item: GivenItem
    previous_item_id: Id | None = None


class ItemRetrieve(ClientEvent):
    """Show an item, with its sound."""

    item_id: Id


class ItemDelete(ClientEvent):
    """Take an item out of the conversation."""

    item_id: Id


class ItemTruncate(ClientEvent):
    """Cut a spoken reply at what was heard."""

    item_id: Id
    content_index: _Index
    audio_end_ms: _Index


class ResponseParameters(ResponseOptions):
    """The `response` of `response.create`."""

    audio: ResponseAudio = ResponseAudio()
    conversation: Literal["auto", "none"] = "auto"
    input: Annotated[list[GivenItem], Field(max_length=MAX_ITEMS)] | None = None
    metadata: Annotated[dict[str, StrictStr], BeforeValidator(without_nulls)] | None = None
    prompt: None = None
    reasoning: None = None

    @property
    def modalities(self) -> tuple[Modality, ...] | None:
        """The modalities that were asked for; None = the session's."""
        return self.output_modalities if "output_modalities" in self.model_fields_set else None


class ResponseCreate(ClientEvent):
    """Ask the model."""

    response: ResponseParameters = ResponseParameters()


class ResponseCancel(ClientEvent):
    """End a response."""

    response_id: Id | None = None


class _Typed(Strict):
    """The part of an event that is read before its type is known."""

    model_config: ClassVar[Any] = {"extra": "ignore"}

    type: StrictStr
    event_id: StrictStr | None = None


TYPES: Mapping[str, type[ClientEvent]] = {
    "session.update": SessionUpdate,
    "input_audio_buffer.append": BufferAppend,
    "input_audio_buffer.commit": BufferCommit,
    "input_audio_buffer.clear": BufferClear,
    "conversation.item.create": ItemCreate,
    "conversation.item.retrieve": ItemRetrieve,
    "conversation.item.truncate": ItemTruncate,
    "conversation.item.delete": ItemDelete,
    "response.create": ResponseCreate,
    "response.cancel": ResponseCancel,
}
"""All events of clients."""


class WrongEvent(GatewayError):
    """A refused event; `event_id` is its client's name for it."""

    event_id: str | None = None


def read_event(body: bytes) -> ClientEvent:
    """An event as its type.

    Raises:
        WrongEvent: the message names the key, the value and what is allowed.
    """
    event_id = None
    try:
        head = parse(_Typed, body)
        event_id = head.event_id
        kind = TYPES.get(head.type)
        if kind is None:
            said = f"Invalid value for 'type': {head.type[:_SHOWN]!a} is none of {', '.join(TYPES)}."
            raise bad_request(said, param="type", code="invalid_value")
        return parse(kind, body)
    except GatewayError as error:
        wrong = WrongEvent(error.status, error.message, error.kind, error.code, error.param)
        wrong.event_id = None if event_id is None else event_id[:_LONGEST_ID]
        raise wrong from error


def new_id(kind: str) -> str:
    """An id of 96 random bits, such as `item_…`."""
    return f"{kind}_{secrets.token_hex(12)}"


def server_event(kind: str, **fields: Any) -> Json:
    """An event of the server."""
    return {"type": kind, "event_id": new_id("event"), **fields}


def error_event(error: GatewayError, event_id: str | None = None) -> Json:
    """The event of a refusal or a fault.

    Args:
        error: what is wrong.
        event_id: the client's name for the event at fault.
    """
    return server_event("error", error={**error.body()["error"], "event_id": event_id})


def written(event: Mapping[str, Any]) -> str:
    """An event as text."""
    return json.dumps(event, separators=(",", ":"), ensure_ascii=False)
