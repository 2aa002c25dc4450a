# SPDX-License-Identifier: Apache-2.0
"""Transcripts of what the user says: the thinker alone writes them beside the reply, which goes first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any, Final

from triton_omni_client import Info, OmniClientError, TextDelta
from triton_omni_gateway.errors import GatewayError, Told, broken
from triton_omni_gateway.replies import usage
from triton_omni_gateway.transcription import listening_request

from .config import Json, Transcription
from .events import server_event
from .formats import heard_wav
from .items import Item
from .outbox import Outbox
from .servers import Servers

PRIORITY: Final = 1
"""After the replies, whose callers wait."""
_EVENT = "conversation.item.input_audio_transcription"
logger = logging.getLogger("uvicorn.error")


class Transcriber:
    """The transcripts of one session, one after another.

    Args:
        servers: who is asked.
        outbox: where its events go.
        prompt: of the deployment, which asks for the words of a sound.
    """

    def __init__(self, servers: Servers, outbox: Outbox, prompt: str) -> None:
        self._servers, self._outbox, self._prompt = servers, outbox, prompt
        self._one = asyncio.Semaphore(1)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, item: Item, asked: Transcription) -> None:
        """Write down what an item's first part says."""
        task = asyncio.create_task(self._write(item, asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """End all."""
        for task in self._tasks:
            task.cancel()

    async def closed(self) -> None:
        """Wait until all has ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _write(self, item: Item, asked: Transcription) -> None:
        async with self._one:
            try:
                await self._stream(item, asked)
            except OmniClientError as error:
                self._fail(item, await self._servers.explain(error, Told, item.item_id))
            except Exception:
                logger.exception("the transcription of %s failed", item.item_id)
                self._fail(item, broken(item.item_id))

    async def _stream(self, item: Item, asked: Transcription) -> None:
        content, info = item.content[0], None
        prompt = "\n\n".join([self._prompt, *_hints(asked)])
        request = listening_request(heard_wav(content.data), prompt, item.item_id, priority=PRIORITY)
        async with self._servers.stream(request) as stream:
            async for delta in stream:
                if isinstance(delta, TextDelta):
                    content.text += delta.text
                    self._put("delta", item, delta=delta.text)
                    await self._outbox.room()
                elif isinstance(delta, Info):
                    info = delta
        self._put("completed", item, transcript=content.text, usage=_usage(info))

    def _fail(self, item: Item, error: GatewayError) -> None:
        told = {"type": error.kind, "code": error.code, "message": error.message, "param": error.param}
        self._put("failed", item, error=told)

    def _put(self, kind: str, item: Item, **fields: Any) -> None:
        self._outbox.put(server_event(f"{_EVENT}.{kind}", item_id=item.item_id, content_index=0, **fields))


def _hints(asked: Transcription) -> Iterator[str]:
    if asked.language:
        yield f"The language is {asked.language}."
    if asked.prompt:
        yield asked.prompt


def _usage(info: Info | None) -> Json:
    found = usage(info)
    details = found["prompt_tokens_details"]
    kinds = {kind: details.get(kind, 0) for kind in ("text_tokens", "audio_tokens")}
    counts = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens", "total_tokens": "total_tokens"}
    return {"type": "tokens", **{name: found[ours] for name, ours in counts.items()}, "input_token_details": kinds}
