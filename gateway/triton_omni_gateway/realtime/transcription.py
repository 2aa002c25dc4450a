# SPDX-License-Identifier: Apache-2.0
"""Transcripts of what the user says: the thinker alone writes them, in most sessions beside a reply."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any, Final

from triton_omni_client import Info, OmniClientError, TextDelta
from triton_omni_gateway.errors import GatewayError, Refusal, bad_request, broken
from triton_omni_gateway.replies import token_counts, usage
from triton_omni_gateway.transcription import listening_request

from .config import Json, Transcription
from .events import server_event
from .formats import heard_wav
from .items import AnyItem, Item
from .outbox import Outbox
from .servers import Servers

BESIDE_REPLIES: Final = 1
"""The priority where there are replies, which go first."""
_EVENT = "conversation.item.input_audio_transcription"
logger = logging.getLogger("uvicorn.error")


class Transcriber:
    """The transcripts of one session, one after another; those that wait are of items of the conversation alone.

    Args:
        servers: who is asked.
        outbox: where its events go.
        prompt: of the deployment, which asks for the words of a sound.
        priority: of its requests; None = that of replies.
    """

    def __init__(self, servers: Servers, outbox: Outbox, prompt: str, priority: int | None) -> None:
        self._servers, self._outbox, self._prompt, self._priority = servers, outbox, prompt, priority
        self._one = asyncio.Semaphore(1)
        self._tasks: dict[AnyItem, asyncio.Task[None]] = {}

    def start(self, item: Item, asked: Transcription) -> None:
        """Write down what an item's first part says."""
        task = self._tasks[item] = asyncio.create_task(self._write(item, asked))
        task.add_done_callback(lambda _: self._tasks.pop(item, None))

    def forget(self, item: AnyItem) -> None:
        """Write down no more of an item, which is taken out of the conversation."""
        if (task := self._tasks.pop(item, None)) is not None:
            task.cancel()
            self._fail(item, bad_request(f"The item {item.item_id} was deleted.", code="item_deleted"))

    def close(self) -> None:
        """End all."""
        for task in self._tasks.values():
            task.cancel()

    async def closed(self) -> None:
        """Wait until all has ended."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _write(self, item: Item, asked: Transcription) -> None:
        async with self._one:
            try:
                await self._stream(item, asked)
            except OmniClientError as error:
                self._fail(item, await self._servers.explain(error, Refusal, item.item_id))
            except Exception:
                logger.exception("the transcription of %s failed", item.item_id)
                self._fail(item, broken(item.item_id))

    async def _stream(self, item: Item, asked: Transcription) -> None:
        content, info = item.content[0], None
        prompt = "\n\n".join([self._prompt, *_hints(asked)])
        request = listening_request(heard_wav(content.data), prompt, item.item_id, priority=self._priority)
        async with self._servers.stream(request) as stream:
            async for delta in stream:
                if isinstance(delta, TextDelta):
                    content.text += delta.text
                    self._put("delta", item, delta=delta.text)
                    await self._outbox.room()
                elif isinstance(delta, Info):
                    info = delta
        self._put("completed", item, transcript=content.text, usage=_usage(info))

    def _fail(self, item: AnyItem, error: GatewayError) -> None:
        told = {"type": error.kind, "code": error.code, "message": error.message, "param": error.param}
        self._put("failed", item, error=told)

    def _put(self, kind: str, item: AnyItem, **fields: Any) -> None:
        self._outbox.put(server_event(f"{_EVENT}.{kind}", item_id=item.item_id, content_index=0, **fields))


def _hints(asked: Transcription) -> Iterator[str]:
    if asked.keywords:
        yield f"These words may be said: {', '.join(asked.keywords)}."
    if asked.prompt:
        yield asked.prompt


def _usage(info: Info | None) -> Json:
    details = usage(info)["prompt_tokens_details"]
    kinds = {kind: details.get(kind, 0) for kind in ("text_tokens", "audio_tokens")}
    return {"type": "tokens", **token_counts(info), "input_token_details": kinds}
