# SPDX-License-Identifier: Apache-2.0
"""Transcripts of what the user says: the thinker alone writes them, in most sessions beside a reply."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any, Final

from triton_omni_client import OmniClientError
from triton_omni_gateway.errors import GatewayError, Refusal, bad_request, broken
from triton_omni_gateway.pool import PooledStream
from triton_omni_gateway.speech_to_text import SpeechToText
from triton_omni_gateway.transcription import Segment, listening_request, usage

from .config import Transcription
from .event_queue import EventQueue
from .events import server_event
from .formats import heard_wav
from .items import AnyItem, Item
from .servers import Servers

BESIDE_REPLIES: Final = 1
"""The priority where there are replies, which go first."""
_EVENT = "conversation.item.input_audio_transcription"
logger = logging.getLogger("uvicorn.error")


class Transcriber:
    """The transcripts of one session, one after another; those that wait are of items of the conversation alone.

    Args:
        servers: who is asked.
        queue: where its events go.
        speech_to_text: has the words of a sound.
        prompt: of the deployment, which asks for the words of a sound.
        priority: of its requests; None = that of replies.
    """

    def __init__(
        self, servers: Servers, queue: EventQueue, speech_to_text: SpeechToText, prompt: str, priority: int | None
    ) -> None:
        self._servers, self._queue, self._to_text = servers, queue, speech_to_text
        self._prompt, self._priority = prompt, priority
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
            except GatewayError as error:  # the sound itself is refused
                self._fail(item, error)
            except Exception:
                logger.exception("the transcription of %s failed", item.item_id)
                self._fail(item, broken(item.item_id))

    async def _stream(self, item: Item, asked: Transcription) -> None:
        content, segments = item.content[0], list[Segment]()
        prompt = "\n\n".join([self._prompt, *_hints(asked)])

        def ask(sound: bytes, label: str) -> PooledStream:
            return self._servers.stream(listening_request(sound, prompt, label, priority=self._priority))

        path = f"{item.item_id}.content[0]"
        async with aclosing(self._to_text.pieces(heard_wav(content.data), path, item.item_id, ask)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Segment):
                    segments.append(piece)
                    continue
                content.text += piece
                self._put("delta", item, delta=piece)
                await self._queue.room()
        self._put("completed", item, transcript=content.text, usage=usage(segments))

    def _fail(self, item: AnyItem, error: GatewayError) -> None:
        told = {"type": error.kind, "code": error.code, "message": error.message, "param": error.param}
        self._put("failed", item, error=told)

    def _put(self, kind: str, item: AnyItem, **fields: Any) -> None:
        self._queue.put(server_event(f"{_EVENT}.{kind}", item_id=item.item_id, content_index=0, **fields))


def _hints(asked: Transcription) -> Iterator[str]:
    if asked.keywords:
        yield f"These words may be said: {', '.join(asked.keywords)}."
    if asked.prompt:
        yield asked.prompt
