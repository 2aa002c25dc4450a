# SPDX-License-Identifier: Apache-2.0
"""One response: the deltas of a reply become events and an item of the conversation. Pure; nothing here waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from triton_omni_client import AudioDelta, Delta, Info, TextDelta, ToolCallDelta, heard_text
from triton_omni_client.audio import SAMPLE_RATE
from triton_omni_gateway.errors import GatewayError
from triton_omni_gateway.replies import finish_reason, to_base64, token_counts, usage

from .calls import CallItem
from .config import FunctionTool, Json, Modality, NamedTool, SoundFormat
from .events import new_id, server_event
from .formats import OutputEncoder
from .items import AnyItem, Content, Item, Items

Ending = Literal["completed", "cancelled", "incomplete", "failed"]
Reason = Literal["turn_detected", "client_cancelled", "max_output_tokens"]
_TEXT, _TRANSCRIPT, _AUDIO = "response.output_text", "response.output_audio_transcript", "response.output_audio"


@dataclass(frozen=True)
class Asked:
    """A response as it is asked for."""

    instructions: str | None
    modality: Modality
    max_output_tokens: int | Literal["inf"]
    voice: str | None
    sound_format: SoundFormat
    speed: float = 1.0
    metadata: dict[str, str] | None = None
    given: list[AnyItem] | None = None
    """Items in place of the conversation's; None = those of the conversation."""
    in_conversation: bool = True
    tools: tuple[FunctionTool, ...] = ()
    tool_choice: str | NamedTool = "auto"
    parallel_tool_calls: bool | None = None


@dataclass(eq=False)
class Response:
    """A response under way.

    Args:
        asked: what it is to be.
        conversation: where its item goes, and the id of the conversation.
        put: sends an event.
    """

    asked: Asked
    conversation: Items
    conversation_id: str
    put: Callable[[Json], None]
    response_id: str = field(default_factory=lambda: new_id("resp"))
    status: Ending | Literal["in_progress"] = "in_progress"
    reason: str = "session_ended"
    """Why it ended, one of a few words; as here where its session ended first."""
    output: list[Item | CallItem] = field(default_factory=list)
    _details: Json | None = None
    _info: Info | None = None

    def __post_init__(self) -> None:
        self._encoder = OutputEncoder(self.asked.sound_format, self.asked.speed)
        self._calls: list[CallItem] = []

    @property
    def is_over(self) -> bool:
        """True once its end was told."""
        return self.status != "in_progress"

    @property
    def is_spoken(self) -> bool:
        """True if it is heard."""
        return self.asked.modality == "audio"

    @property
    def seconds(self) -> float:
        """Length of the speech that was sent."""
        return self._encoder.seconds

    def begin(self) -> None:
        """Tell that it is made."""
        self.put(server_event("response.created", response=self._told()))
        self.put(server_event("rate_limits.updated", rate_limits=[]))

    def feed(self, delta: Delta) -> None:
        """Send what came of the reply; after the end nothing is sent."""
        if self.is_over:
            return
        match delta:
            case TextDelta() if delta.text:
                content = self._content()
                content.text += delta.text
                self._put_part(f"{_TRANSCRIPT if self.is_spoken else _TEXT}.delta", delta=delta.text)
            case AudioDelta() if self.is_spoken and len(delta.samples):
                self._put_sound(self._encoder.encode(delta.samples))
            case ToolCallDelta():
                self._feed_call(delta)
            case Info():
                self._info = delta

    def _feed_call(self, piece: ToolCallDelta) -> None:
        """A piece of a call, whose first one names it."""
        if piece.id is not None or not self._calls:
            self._calls.append(CallItem(piece.name or "", piece.id or new_id("call"), status="in_progress"))
            self._add(self._calls[-1])
        call = self._calls[-1]
        call.arguments += piece.arguments
        if piece.arguments:
            self._put_call("delta", call, delta=piece.arguments)

    def _put_call(self, kind: str, call: CallItem, **fields: str) -> None:
        where = {**self._place(call), "call_id": call.call_id}
        self.put(server_event(f"response.function_call_arguments.{kind}", **where, **fields))

    def end(self) -> None:
        """The reply is complete, or a limit cut it off."""
        if (reason := finish_reason(self._info)) == "length":
            self._finish("incomplete", {"type": "incomplete", "reason": "max_output_tokens"}, "max_output_tokens")
        else:
            self._finish("completed", {"type": "completed"}, reason)

    def cancel(self, reason: Reason) -> None:
        """End it; of its text remains what was spoken in the sound that was sent."""
        if not self.is_over and self.is_spoken and self.message is not None:
            content = self._content()
            content.text = heard_text(content.text, self.seconds, self._whole_seconds())
        self._finish("cancelled", {"type": "cancelled", "reason": reason}, reason)

    def fail(self, error: GatewayError) -> None:
        """The server refused it or failed."""
        told = {"type": error.kind, "code": error.code, "message": error.message}
        self._finish("failed", {"type": "failed", "error": told}, error.code or error.kind)

    def _whole_seconds(self) -> float | None:
        samples = None if self._info is None else self._info.samples
        return None if samples is None else samples / SAMPLE_RATE / self.asked.speed

    def _finish(self, ending: Ending, details: Json, reason: str) -> None:
        if self.is_over:
            return
        self.status, self._details, self.reason = ending, details, reason
        for item in self.output:
            if isinstance(item, CallItem):
                self._put_call("done", item, name=item.name, arguments=item.arguments)
            else:
                self._end_message()
            item.status = "completed" if ending == "completed" else "incomplete"
            self._put_item("conversation.item.done", item)
            self._put_output("done", item)
        self.put(server_event("response.done", response=self._told()))

    def _end_message(self) -> None:
        content = self._content()
        if self.is_spoken:
            self._put_sound(self._encoder.end())
            self._put_part(f"{_AUDIO}.done")
            self._put_part(f"{_TRANSCRIPT}.done", transcript=content.text)
        else:
            self._put_part(f"{_TEXT}.done", text=content.text)
        self._put_part("response.content_part.done", part=self._part(content))

    @property
    def message(self) -> Item | None:
        """The item that is written or spoken, once it has begun."""
        return next((item for item in self.output if isinstance(item, Item)), None)

    def _content(self) -> Content:
        """The one part of the message, which begins with the first delta."""
        return self._the_message().content[0]

    def _the_message(self) -> Item:
        if (message := self.message) is None:
            content = Content("output_audio" if self.is_spoken else "output_text")
            message = Item("assistant", [content], status="in_progress")
            self._add(message, {**message.told(), "content": []})
            self._put_part("response.content_part.added", part=self._part(content))
        return message

    def _add(self, item: Item | CallItem, shown: Json | None = None) -> None:
        """Begin an item."""
        self.output.append(item)
        self._put_output("added", item, shown)
        if self.asked.in_conversation:
            self.conversation.put(item)
        self._put_item("conversation.item.added", item, shown)

    def _put_output(self, kind: str, item: Item | CallItem, shown: Json | None = None) -> None:
        where = {"response_id": self.response_id, "output_index": self.output.index(item)}
        self.put(server_event(f"response.output_item.{kind}", **where, item=shown or item.told()))

    def _put_item(self, kind: str, item: Item | CallItem, shown: Json | None = None) -> None:
        if self.asked.in_conversation and item in self.conversation:
            before = self.conversation.before(item)
            self.put(server_event(kind, previous_item_id=before, item=shown or item.told()))

    def _place(self, item: Item | CallItem) -> Json:
        return {"response_id": self.response_id, "item_id": item.item_id, "output_index": self.output.index(item)}

    def _put_sound(self, data: bytes) -> None:
        self._content().seconds = self.seconds
        if data:
            self._put_part(f"{_AUDIO}.delta", delta=to_base64(data))

    def _put_part(self, kind: str, **fields: Any) -> None:
        self.put(server_event(kind, **self._place(self._the_message()), content_index=0, **fields))

    def _part(self, content: Content) -> Json:
        return (
            {"type": "audio", "transcript": content.text} if self.is_spoken else {"type": "text", "text": content.text}
        )

    def _told(self) -> Json:
        asked = self.asked
        sound = {"format": asked.sound_format.model_dump(), "voice": asked.voice}
        return {
            "object": "realtime.response",
            "id": self.response_id,
            "status": self.status,
            "status_details": self._details,
            "output": [item.told() for item in self.output],
            "conversation_id": self.conversation_id if asked.in_conversation else None,
            "output_modalities": [asked.modality],
            "max_output_tokens": asked.max_output_tokens,
            "audio": {"output": sound},
            "usage": realtime_usage(self._info) if self.is_over else None,
            "metadata": asked.metadata,
        }


def realtime_usage(info: Info | None) -> Json:
    """OpenAI's usage of a response: codec codes are its audio tokens."""
    found = usage(info)
    details = found["prompt_tokens_details"]
    kinds = {kind: details.get(kind, 0) for kind in ("text_tokens", "audio_tokens", "image_tokens", "cached_tokens")}
    said = {kind: found["completion_tokens_details"][kind] for kind in ("text_tokens", "audio_tokens")}
    return {
        **token_counts(info),
        "input_token_details": kinds,
        "output_token_details": said,
    }
