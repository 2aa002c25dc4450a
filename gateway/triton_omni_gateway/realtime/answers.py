# SPDX-License-Identifier: Apache-2.0
"""The responses of a session: asked of a server, sent as they come, cancelled on all stages."""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from triton_omni_client import AsyncListening, Media, OmniClientError, Request, Retry, Timings
from triton_omni_client.conversation import HINT_PRIORITY
from triton_omni_client.messages import Modality, media_fields
from triton_omni_gateway.errors import CONTEXT_LENGTH, GatewayError, bad_request, broken
from triton_omni_gateway.field_names import FieldNames
from triton_omni_gateway.pool import PooledStream

from .calls import tool_fields
from .config import Json, RetentionRatio, SessionConfig
from .event_queue import EventQueue
from .events import server_event
from .items import AnyItem, Items, media_names, messages_of
from .limits import RealtimeLimits
from .response import Reason, Response
from .servers import Servers

_NAMES: Final = FieldNames(
    {
        "messages": "conversation",
        "tools": "tools",
        "voice": "audio.output.voice",
        "sampling_parameters": "",
        "sampling_parameters.voice": "audio.output.voice",
        "sampling_parameters.thinker.max_tokens": "max_output_tokens",
    },
    "conversation",
    "the response",
)
_NOTHING_SAID: Final[list[Json]] = [
    {
        "role": "system",
        "content": "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving "
        "auditory and visual inputs, as well as generating text and speech.",
    }
]
"""The chat of an empty conversation: a chat has at least one message, and the server itself begins with this one where
it is given no system prompt.
"""
_RETAINED = 0.8
"""Share that is kept of a conversation that is too long, where the client does not say."""
_FOR_THE_REPLY = 0.1
"""Share of the longest prompt that a conversation leaves free."""
logger = logging.getLogger("uvicorn.error")


class Answers:
    """The responses of one session.

    Args:
        servers: who is asked.
        limits: how many at once.
        items: the conversation.
        queue: where its events go.
        ended: called with each response of the conversation at its end.
        dropped: called with each item that is taken out of the conversation.
    """

    def __init__(
        self,
        servers: Servers,
        limits: RealtimeLimits,
        items: Items,
        queue: EventQueue,
        *,
        ended: Callable[[Response], None],
        dropped: Callable[[AnyItem], None],
    ) -> None:
        self._servers, self._limits, self._items = servers, limits, items
        self._put, self._room, self._ended, self._dropped = queue.put, queue.room, ended, dropped
        self._salt = secrets.token_urlsafe(24)
        self._tasks: dict[Response, asyncio.Task[None]] = {}
        self._streams: dict[Response, PooledStream] = {}
        self._timings: dict[Response, Timings] = {}
        """Of their last replies, until they end."""
        self._hints: weakref.WeakSet[PooledStream] = weakref.WeakSet()
        self._refused_prefill = False
        self._prefill: AsyncListening[Media] | None = None
        self.config = SessionConfig()
        """The session's; set by it."""

    @property
    def active(self) -> Response | None:
        """The response that is added to the conversation."""
        return next((one for one in self._tasks if one.asked.in_conversation and not one.is_over), None)

    def create(self, response: Response) -> None:
        """Begin a response.

        Raises:
            GatewayError: 400, another one is under way.
        """
        self._check_free(response)
        response.begin()
        task = asyncio.create_task(self._answer(response))
        self._tasks[response] = task
        task.add_done_callback(functools.partial(self._leave, response, time.monotonic()))

    def _leave(self, response: Response, begin: float, _task: asyncio.Task[None]) -> None:
        self._tasks.pop(response, None)
        status = response.status if response.is_over else "cancelled"
        seconds, timings = time.monotonic() - begin, self._timings.pop(response, None)
        self._servers.responded(response.response_id, status, response.reason, seconds, timings)

    def _check_free(self, response: Response) -> None:
        if response.asked.in_conversation and (active := self.active) is not None:
            said = f"The conversation has the response {active.response_id} under way: wait for its end, or cancel it."
            raise bad_request(said, code="conversation_already_has_active_response")
        aside = sum(not one.asked.in_conversation for one in self._tasks)
        if not response.asked.in_conversation and aside >= self._limits.max_side_responses:
            said = f"{aside} responses outside of the conversation are under way, the limit: wait for the end of one."
            raise bad_request(said, code="too_many_responses")

    def cancel(self, response_id: str | None, reason: Reason) -> bool:
        """End a response, by default that of the conversation; False where there is none."""
        found = self.active
        if response_id is not None:
            found = next((one for one in self._tasks if one.response_id == response_id and not one.is_over), None)
        if found is None:
            return False
        stream = self._streams.pop(found, None)
        if stream is not None:
            stream.close()
        found.cancel(reason)
        self._tell_end(found)
        return True

    def listen(self) -> AsyncListening[Media] | None:
        """Begin an utterance that is computed while it comes; None where the server has no cache for it."""
        refusal = None if self._prefill is None else self._prefill.refusal
        if refusal is not None and "prefill_only" in refusal.message:  # else longer hints of that utterance are refused
            self._refused_prefill = True
        if self._refused_prefill or self.active is not None:
            return None
        self._prefill = AsyncListening(self, self._hint, lambda _text, media: media[0])
        return self._prefill

    def stream(self, request: Request, *, retry: Retry | None = None) -> PooledStream:
        """Send a hint of an utterance; it may outlast that, but not the session."""
        hint = self._servers.stream(request, retry=retry)
        self._hints.add(hint)
        return hint

    def close(self) -> None:
        """End all at once, as the connection ends."""
        for stream in [*self._streams.values(), *self._hints]:
            stream.close()
        for task in self._tasks.values():
            task.cancel()

    async def closed(self) -> None:
        """Wait until all has ended."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _hint(self, sound: Media) -> Request:
        messages, media = messages_of(list(self._items), self.config.instructions)
        messages.append({"role": "user", "content": [{"type": sound.kind}]})
        modalities = self._modalities(self.config.output_modalities[0])
        config = self.config
        tools = tool_fields(config.tools, config.tool_choice, config.parallel_tool_calls)
        return self._with(messages, [*media, sound], modalities, **tools, prefill_only=True, priority=HINT_PRIORITY)

    def _request(self, response: Response, items: Iterable[AnyItem]) -> Request:
        asked = response.asked
        messages, media = messages_of(items, asked.instructions)
        thinker = {} if asked.max_output_tokens == "inf" else {"max_tokens": asked.max_output_tokens}
        tools = tool_fields(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
        options = {"voice": asked.voice, "thinker": thinker, "request_id": response.response_id, **tools}
        return self._with(messages or _NOTHING_SAID, media, self._modalities(asked.modality), **options)

    def _with(
        self, messages: list[Json], media: list[Media], modalities: tuple[Modality, ...], **options: Any
    ) -> Request:
        fields = {**media_fields(media), "modalities": modalities, "cache_salt": self._salt, "audio_in_pieces": True}
        return Request(messages=messages, **fields, **options)

    @staticmethod
    def _modalities(modality: Modality) -> tuple[Modality, ...]:
        return ("text", "audio") if modality == "audio" else ("text",)

    async def _answer(self, response: Response) -> None:
        try:
            if response.asked.given is None:
                self._trim(await self._servers.request_limits())
            while await self._is_too_long(response):
                pass
        except Exception:
            logger.exception("%s failed", response.response_id)
            response.fail(broken(response.response_id))
        if response.status != "cancelled":
            self._tell_end(response)

    async def _is_too_long(self, response: Response) -> bool:
        """Ask; True where the server refused the conversation as too long, and a shorter one is to be tried."""
        items = list(self._items) if response.asked.given is None else response.asked.given
        names = replace(_NAMES, media=media_names(items))
        try:
            stream = await self._servers.ask(self._request(response, items))
            await self._send(response, stream)
        except OmniClientError as error:
            meant = await self._servers.explain(error, names.told, response.response_id)
            if _is_of_length(meant, names.media) and self._shorten(response):
                return True
            response.fail(meant)
        return False

    async def _send(self, response: Response, stream: PooledStream) -> None:
        if response.is_over:  # cancelled before it was asked
            stream.close()
            return
        self._streams[response] = stream
        try:
            async with stream:
                async for delta in stream:
                    response.feed(delta)
                    await self._room()
        finally:
            self._streams.pop(response, None)
            self._timings[response] = stream.timings()
            self._servers.replied(stream)
        response.end()

    def _tell_end(self, response: Response) -> None:
        if response.asked.in_conversation:
            self._ended(response)

    def _shorten(self, response: Response) -> bool:
        """Drop the oldest items, whatever was estimated; False where none may go."""
        if response.is_over or response.output or response.asked.given is not None:
            return False
        if self.config.truncation == "disabled":
            return False
        tokens = self._items.tokens
        gone = self._items.over_tokens(0, tokens * min(self._ratio, 0.9))
        self.drop(gone)
        return bool(gone)

    @property
    def _ratio(self) -> float:
        rule = self.config.truncation
        return rule.retention_ratio if isinstance(rule, RetentionRatio) else _RETAINED

    def _trim(self, limits: Mapping[str, Any]) -> None:
        """Drop the oldest items of a conversation that is too long for the server, by OpenAI's rule."""
        rule, longest = self.config.truncation, limits.get("max_prompt_tokens")
        if rule == "disabled":
            return
        limit = None if longest is None else longest * (1 - _FOR_THE_REPLY) - len(self.config.instructions or "") / 3
        if isinstance(rule, RetentionRatio) and rule.token_limits.post_instructions is not None:
            limit = min(rule.token_limits.post_instructions, limit or rule.token_limits.post_instructions)
        if limit is not None:
            self.drop(self._items.over_tokens(limit, limit * self._ratio))

    def drop(self, items: Iterable[AnyItem]) -> None:
        """Take items out of the conversation, and tell it."""
        for item in list(items):
            self._items.remove(item)
            self._put(server_event("conversation.item.deleted", item_id=item.item_id))
            self._dropped(item)


def _is_of_length(error: GatewayError, media: tuple[str, ...]) -> bool:
    """True where a server refused the conversation as too long, not one medium or another key of the session."""
    is_of_conversation = error.param is None or error.param.startswith(_NAMES.prompt)
    is_too_large = error.status == 413 and is_of_conversation and error.param not in media
    return error.code == CONTEXT_LENGTH or is_too_large
