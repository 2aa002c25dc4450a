# SPDX-License-Identifier: Apache-2.0
"""One session: each event of its client changes it and is answered; sound in it begins and ends turns.

Between two events of a client and two deltas of a server nothing waits but for media, which threads read and write. So
what is told is what is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, cast

from triton_omni_client import AsyncListening, Media
from triton_omni_gateway.errors import GatewayError, bad_request
from triton_omni_gateway.speech_to_text import SpeechToText
from triton_omni_gateway.translate import served_model

from . import events
from .answers import Answers
from .calls import needed
from .config import Json, SessionConfig, TranscriptionConfig, given_of, merged
from .detection import check_detection, default_detection
from .event_queue import EventQueue
from .events import ClientEvent, new_id, server_event
from .formats import BYTES_A_MS, SHORTEST_MS, InputDecoder
from .idle import IdleTimer
from .items import AnyItem, Content, Item, Items, decoded_base64, made_item
from .limits import RealtimeLimits
from .response import Asked, Response
from .servers import Servers
from .smart_turn import SmartTurn
from .speech_input import SpeechInput
from .transcription import BESIDE_REPLIES, Transcriber
from .turns import Change, Paused, Started, Stopped

_ABOUT_REPLIES = (events.ItemCreate, events.ItemTruncate, events.ResponseCreate, events.ResponseCancel)
"""Events that a session which makes no responses has no use for."""


class Session:
    """A session.

    Args:
        servers: who is asked.
        limits: its bounds.
        queue: where its events go.
        smart_turn: tells whether a sentence is finished.
        speech_to_text: writes down what the user says.
        transcription_prompt: asks for the words of a sound.
        models: names that `model` may have.
        given: configuration that it begins with.
    """

    def __init__(
        self,
        servers: Servers,
        limits: RealtimeLimits,
        queue: EventQueue,
        *,
        smart_turn: SmartTurn,
        speech_to_text: SpeechToText,
        transcription_prompt: str,
        models: tuple[str, ...],
        given: Mapping[str, Any],
    ) -> None:
        self.session_id = new_id("sess")
        self._conversation_id = new_id("conv")
        self._expires_at = int(time.time() + limits.session_seconds)
        self._limits, self._models, self._queue, self._put = limits, models, queue, queue.put
        self._items = Items(limits)
        self._answers = Answers(servers, limits, self._items, queue, ended=self._response_ended, dropped=self._dropped)
        self._given = merged({"audio": {"input": {"turn_detection": default_detection()}}}, given)
        self._config = checked_config(self._given, models, limits)
        self._speech = SpeechInput(limits, self._config.audio.input, self._listen)
        priority = BESIDE_REPLIES if self._answers_turns else None
        self._transcriber = Transcriber(servers, queue, speech_to_text, transcription_prompt, priority)
        self._smart_turn = smart_turn
        self._idle = IdleTimer(self._idled)
        self._turn_id = new_id("item")
        """Id of the item that the turn under way will be."""
        self._turn_begin_ms = 0

        self._configure_answers()

    @property
    def _answers_turns(self) -> bool:
        """False in a session that writes down what is said, and does nothing else."""
        return isinstance(self._config, SessionConfig)

    def _configure_answers(self) -> None:
        if isinstance(self._config, SessionConfig):
            self._answers.config = self._config

    def _listen(self) -> AsyncListening[Media] | None:
        return self._answers.listen() if self._answers_turns else None

    def begin(self) -> None:
        """Tell the client that it is there."""
        self._put(server_event("session.created", session=self._told()))

    def close(self) -> None:
        """End all that it has under way."""
        self._idle.stop()
        self._speech.close()
        self._answers.close()
        self._transcriber.close()

    async def closed(self) -> None:
        """Wait until all has ended."""
        await self._answers.closed()
        await self._transcriber.closed()

    def _told(self) -> Json:
        head = {"object": self._config.object_name, "id": self.session_id, "expires_at": self._expires_at}
        return {**head, **self._config.told()}

    async def take(self, event: ClientEvent) -> None:
        """Do what an event says.

        Raises:
            GatewayError: it cannot be done; the session is as before.
        """
        if isinstance(event, _ABOUT_REPLIES) and not self._answers_turns:
            said = f"Invalid value for 'type': a transcription session takes no {event.type}; append sound to it."
            raise bad_request(said, param="type", code="invalid_value")
        handlers: Mapping[type[ClientEvent], Callable[[Any], Coroutine[Any, Any, None] | None]] = {
            events.SessionUpdate: self._update,
            events.BufferAppend: self._append,
            events.BufferCommit: self._commit,
            events.BufferClear: self._clear,
            events.ItemCreate: self._create_item,
            events.ItemRetrieve: self._retrieve,
            events.ItemTruncate: self._truncate,
            events.ItemDelete: self._delete,
            events.ResponseCreate: self._create_response,
            events.ResponseCancel: self._cancel_response,
        }
        working = handlers[type(event)](event)
        if working is not None:
            await working

    def _update(self, event: events.SessionUpdate) -> None:
        if event.session.type != self._config.type:
            said = f"Invalid value for 'session.type': {event.session.type!r}; the session is of {self._config.type!r}."
            raise bad_request(said, param="session.type", code="invalid_value")
        given = merged(self._given, given_of(event.session))
        config = checked_config(given, self._models, self._limits)
        self._given, self._config = given, config
        self._configure_answers()
        self._speech.configure(config.audio.input)
        if self._idle_ms() is None:
            self._stop_idle()
        self._put(server_event("session.updated", session=self._told()))

    async def _append(self, event: events.BufferAppend) -> None:
        data = decoded_base64(event.audio, "audio")
        if self._speech.overflows(data) and (ended := self._speech.stop()) is not None:
            self._turn_ends(ended)  # or whoever speaks without a pause would be heard no more
        for piece in self._speech.slices(data):
            for change in self._speech.feed(piece):
                await self._turn(change)
            await asyncio.sleep(0)  # others are served between two seconds of sound

    async def _turn(self, change: Change) -> None:
        """Somebody begins to speak, pauses, or ends."""
        match change:
            case Started():
                self._turn_begins(change)
            case Stopped():
                self._turn_ends(change)
            case Paused():
                pcm = self._speech.between(change.begin_ms, change.end_ms)
                if await self._smart_turn.is_over(pcm) and (ended := self._speech.stop()) is not None:
                    self._turn_ends(ended)

    def _turn_begins(self, change: Started) -> None:
        self._stop_idle()
        self._turn_begin_ms = change.begin_ms
        self._put_turn("speech_started", audio_start_ms=change.begin_ms)
        if self._speech.detection is not None and self._speech.detection.interrupt_response:
            self._answers.cancel(None, "turn_detected")

    def _turn_ends(self, change: Stopped) -> None:
        detection = self._speech.detection
        self._put_turn("speech_stopped", audio_end_ms=change.end_ms)
        item = self._add_sound(self._speech.utterance(self._turn_begin_ms, change.end_ms))
        wanted = self._answers_turns and detection is not None and detection.create_response
        if wanted and self._answers.active is None:
            self._respond_unasked()
        self._transcribe(item)

    def _put_turn(self, kind: str, **places: int) -> None:
        self._put(server_event(f"input_audio_buffer.{kind}", item_id=self._turn_id, **places))

    def _commit(self, _event: events.BufferCommit) -> None:
        sound = self._speech.commit()
        self._stop_idle()
        self._transcribe(self._add_sound(sound))

    def _transcribe(self, item: Item) -> None:
        if (asked := self._config.audio.input.transcription) is not None:
            self._transcriber.start(item, asked)

    def _add_sound(self, pcm: bytes) -> Item:
        """Sound of the user becomes an item."""
        item = Item("user", [Content("input_audio", data=pcm)], self._turn_id)
        self._turn_id = new_id("item")
        before = self._items.last_id
        self._put(server_event("input_audio_buffer.committed", previous_item_id=before, item_id=item.item_id))
        self._add(item, None)
        return item

    def _clear(self, _event: events.BufferClear) -> None:
        self._speech.clear()
        self._put(server_event("input_audio_buffer.cleared"))

    async def _create_item(self, event: events.ItemCreate) -> None:
        item = await self._made(event.item, "item")
        if item.size > self._limits.max_conversation_bytes:
            said = f"The item has {item.size} bytes, and a conversation may have {self._limits.max_conversation_bytes}."
            raise bad_request(said, param="item.content", code="item_too_large")
        self._add(item, event.previous_item_id)

    def _add(self, item: AnyItem, after: str | None) -> None:
        self._items.put(item, after)
        before = self._items.before(item)
        self._put(server_event("conversation.item.added", previous_item_id=before, item=item.told()))
        self._put(server_event("conversation.item.done", previous_item_id=before, item=item.told()))
        self._answers.drop(self._items.over_size())

    async def _retrieve(self, event: events.ItemRetrieve) -> None:
        """Show an item with its media, which take long enough to encode to hold others up."""
        item = self._items.find(event.item_id)
        told = await asyncio.to_thread(item.told, self._config.audio.input.format)
        self._items.find(event.item_id)  # a response may have dropped it meanwhile
        self._put(server_event("conversation.item.retrieved", item=told))

    def _truncate(self, event: events.ItemTruncate) -> None:
        item = self._items.find(event.item_id)
        if not isinstance(item, Item):
            raise bad_request("'item_id' names no message: only the assistant's speech is truncated.", param="item_id")
        active = self._answers.active
        if active is not None and item in active.output:
            # Its end would otherwise come after its cut.
            self._answers.cancel(active.response_id, "client_cancelled")
        item.truncate(event.content_index, event.audio_end_ms)
        told = {"item_id": item.item_id, "content_index": event.content_index, "audio_end_ms": event.audio_end_ms}
        self._put(server_event("conversation.item.truncated", **told))

    def _delete(self, event: events.ItemDelete) -> None:
        item = self._items.find(event.item_id)
        active = self._answers.active
        if active is not None and item in active.output:
            said = f"The item {item.item_id} belongs to a response that is under way: cancel it, then delete the item."
            raise bad_request(said, param="item_id", code="item_in_use")
        self._answers.drop([item])

    async def _made(self, given: events.GivenItem, path: str) -> AnyItem:
        """An item as it was given; sound and pictures of megabytes take long enough to hold others up."""
        return await asyncio.to_thread(made_item, given, InputDecoder(self._config.audio.input.format), path)

    async def _create_response(self, event: events.ResponseCreate) -> None:
        given = None
        if event.response.input is not None:
            named = ((item, f"response.input[{place}]") for place, item in enumerate(event.response.input))
            given = [await self._given_item(item, path) for item, path in named]
        self._stop_idle()
        self._respond(event.response, given)

    def _respond(self, asked: events.ResponseParameters, given: list[AnyItem] | None = None) -> None:
        config, output = self._answers.config, self._answers.config.audio.output
        own_length = "max_output_tokens" in asked.model_fields_set
        wanted = Asked(
            instructions=config.instructions if asked.instructions is None else asked.instructions,
            modality=(asked.modalities or config.output_modalities)[0],
            max_output_tokens=asked.max_output_tokens if own_length else config.max_output_tokens,
            voice=asked.audio.output.voice or output.voice,
            sound_format=asked.audio.output.format or output.format,
            speed=output.speed,
            metadata=asked.metadata,
            given=given,
            in_conversation=asked.conversation == "auto",
            tools=asked.tools if "tools" in asked.model_fields_set else config.tools,
            tool_choice=asked.tool_choice if "tool_choice" in asked.model_fields_set else config.tool_choice,
            parallel_tool_calls=(
                config.parallel_tool_calls if asked.parallel_tool_calls is None else asked.parallel_tool_calls
            ),
        )
        self._answers.create(Response(wanted, self._items, self._conversation_id, self._put))

    async def _given_item(self, given: events.GivenItem, path: str) -> AnyItem:
        """An item of a response's own input, or one of the conversation that it names."""
        if given.type == "item_reference":
            return self._items.find(needed(given, "id", path), f"{path}.id")
        return await self._made(given, path)

    def _cancel_response(self, event: events.ResponseCancel) -> None:
        if not self._answers.cancel(event.response_id, "client_cancelled"):
            raise bad_request("There is no such response under way.", code="response_cancel_not_active")

    def _dropped(self, item: AnyItem) -> None:
        self._transcriber.forget(item)

    def _response_ended(self, response: Response) -> None:
        """Wait for the user, who hears it yet."""
        idle_ms = self._idle_ms()
        if idle_ms is not None and not self._speech.speaks and response.status in ("completed", "incomplete"):
            self._idle.start(response.seconds, idle_ms / 1000, self._note_silence)

    def _note_silence(self) -> None:
        self._speech.kept_from_ms = self._speech.end_ms

    def _idle_ms(self) -> int | None:
        return getattr(self._speech.detection, "idle_timeout_ms", None)

    def _stop_idle(self) -> None:
        self._idle.stop()
        self._speech.kept_from_ms = None

    def _idled(self) -> None:
        """Nobody spoke for long: go on as if silence were said."""
        begin_ms, end_ms = cast(int, self._speech.kept_from_ms), self._speech.end_ms
        self._speech.kept_from_ms = None
        if self._answers.active is not None:
            return
        self._put_turn("timeout_triggered", audio_start_ms=begin_ms, audio_end_ms=end_ms)
        sound = self._speech.utterance(begin_ms, end_ms)
        if len(sound) >= SHORTEST_MS * BYTES_A_MS:  # some may have been cleared; the model hears nothing shorter
            self._add_sound(sound)
        self._respond_unasked()

    def _respond_unasked(self) -> None:
        """Answer the end of a turn, which no event asked for that could be refused."""
        try:
            self._respond(events.ResponseParameters())
        except GatewayError as error:
            self._put(events.error_event(error))


def checked_config(
    given: Mapping[str, Any], models: tuple[str, ...], limits: RealtimeLimits
) -> SessionConfig | TranscriptionConfig:
    """A session's configuration.

    Raises:
        GatewayError: a value that cannot be served.
    """
    kind = TranscriptionConfig if given.get("type") == "transcription" else SessionConfig
    config = kind.model_validate(given)
    if isinstance(config, SessionConfig) and config.model is not None:
        config = config.model_copy(update={"model": served_model(config.model, models)})
    check_detection(config.audio.input.turn_detection, limits.max_buffer_seconds)
    return config
