# SPDX-License-Identifier: Apache-2.0
"""Serves a request: reads it, asks the Triton server, and answers while the reply comes.

A caller that leaves is noticed at once, also while nothing is sent, and its request is cancelled on the server.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from triton_omni_client import (
    AudioDelta,
    Delta,
    Info,
    OmniClientError,
    Request,
    Retry,
    ServedModel,
    TextDelta,
    Timings,
    ToolCallDelta,
)
from triton_omni_client.messages import MODEL

from .connection import FlowingResponse, read_body, until_gone
from .connections import TRAILERS
from .errors import OF_THE_SERVER, CutOff, GatewayError, Naming, from_client
from .field_names import SPEECH_NAMES, chat_names
from .metrics import Metrics
from .pool import PooledStream, ServerPool
from .replies import ChatChunks, Head, Spoken, completion, event, finish_reason, speech_delta, speech_done
from .request_log import log_response, note_end, note_error, note_times
from .schemas import ChatRequest, SpeechRequest, parse
from .settings import GatewaySettings
from .sound import MEDIA_TYPES, SoundEncoder
from .transcripts import Transcripts
from .translate import chat_format, chat_request, check_priority, served_model, speech_format, speech_request

EVENTS = "text/event-stream"
_LONGEST_TRACEPARENT = 64
_PARSED_AT_ONCE = 1 << 18
"""Bytes of a body that is parsed in a millisecond or so; a larger one must not hold up everybody's speech."""
SEED_HEADER = "x-seed"
END_TRAILER = "x-finish-reason"
"""Header after a sound that tells why it ended."""
DRAWN_SEED_BITS = 53
"""Bits of a drawn seed, as in the server: JSON readers hold larger integers as inexact doubles."""
logger = logging.getLogger("uvicorn.error")

Schema = TypeVar("Schema", bound=BaseModel)


@dataclass(frozen=True)
class Opened:
    """A reply that has begun: its first delta, and the stream of the others."""

    first: Delta | None
    stream: PooledStream

    async def deltas(self) -> AsyncIterator[Delta]:
        """All deltas in order."""
        if self.first is not None:
            yield self.first
        async for delta in self.stream:
            yield delta


class Gateway:
    """The two ways to ask the model; the methods raise `GatewayError`, `OmniClientError` or `ClientGone`."""

    def __init__(self, settings: GatewaySettings, pool: ServerPool, transcripts: Transcripts, metrics: Metrics) -> None:
        self._settings = settings
        self._pool = pool
        self._transcripts = transcripts
        self._metrics = metrics
        self._own_voices: list[str] | None = None
        """Voices of the checkpoint once a server told them: asking again takes 3 ms of each request."""
        self._request_limits: Mapping[str, Any] | None = None

    async def ready(self) -> bool:
        """True if a Triton server takes requests."""
        return await self._pool.ready()

    async def meaning(self, http: HttpRequest, error: OmniClientError) -> GatewayError:
        """Return the meaning of a server error for the caller now; Triton's own words go to the log."""
        return await self.explain(error, http.state.naming, http.state.request_id)

    async def explain(self, error: OmniClientError, naming: Naming, request_id: str) -> GatewayError:
        """The same of a request that is no HTTP request of its own."""
        if error.by_triton or error.code in ("internal", "connection_failed"):
            logger.error("%s failed in Triton: %s", request_id, error.message)
        is_ready = error.code not in OF_THE_SERVER or await self.ready()
        return from_client(error, naming, request_id, is_ready=is_ready)

    def stream(self, request: Request, *, retry: Retry | None = None) -> PooledStream:
        """Send a request as it is; the pool retries none."""
        return self._pool.stream(request)

    async def ask(self, request: Request) -> PooledStream:
        """Send a request in a voice of the checkpoint."""
        return self._pool.stream(await self._in_voice(request))

    async def request_limits(self) -> Mapping[str, Any]:
        """The server's limits of a request; none where it does not tell them."""
        if self._request_limits is None:
            model = await self._model()
            self._request_limits = None if model is None else model.limits
        return self._request_limits or {}

    def replied(self, stream: PooledStream) -> None:
        """Count a reply that has ended."""
        self._metrics.replied(stream.timings())

    def responded(self, response_id: str, status: str, reason: str, seconds: float, timings: Timings | None) -> None:
        """Count a response of a session that has ended, and log it."""
        self._metrics.responded(status, reason)
        log_response(response_id, status, reason, seconds, timings)

    async def failed(self, http: HttpRequest, error: OmniClientError) -> bytes:
        """The event of an error inside a stream; its status is what is counted."""
        meant = await self.meaning(http, error)
        http.scope["state"]["status"] = meant.status
        note_error(http.scope, meant)
        logger.error("%s failed while its answer was sent: %s", http.state.request_id, meant.message)
        return event(meant.body())

    async def voices(self) -> list[str] | None:
        """Return the allowed values of `voice`, the default first; None where the server does not tell."""
        model = await self._model()
        return None if model is None or model.voices is None else list(model.voices)

    async def _model(self) -> ServedModel | None:
        """The server's account of its model; None where it gives none."""
        try:
            models = await self._pool.models()
        except OmniClientError:
            return None
        return next((model for model in models if model.name == MODEL), None)

    async def _in_voice(self, request: Request) -> Request:
        """The request in a voice of the checkpoint; the server refuses a name that neither it nor the settings know."""
        asked, table = request.voice, self._settings.voices
        if asked is None or asked not in table:
            return request
        if self._own_voices is None:
            self._own_voices = await self.voices()
        if asked in (self._own_voices or ()):
            return request
        return replace(request, voice=table[asked])

    async def chat(self, http: HttpRequest) -> Response:
        """`POST /v1/chat/completions`."""
        chat = await self._read(http, ChatRequest)
        http.state.naming = chat_names(chat).told
        model = served_model(chat.model, self._settings.models)
        check_priority(chat.priority, self._settings.min_priority)
        spoken = self._spoken(chat) if chat.wants_audio and not chat.prefill_only else None
        asked = chat_request(chat, self._transcripts.find, http.state.request_id, http.state.caller)
        request = traced(await self._in_voice(asked), http)
        head = Head(http.state.request_id.replace("req_", "chatcmpl-"), model)
        if not chat.stream:
            return await self._whole_chat(http, request, head, spoken)
        include_usage = bool(chat.stream_options and chat.stream_options.include_usage)
        chunks = ChatChunks(head, spoken, include_usage=include_usage)
        opened = await self._open(http, request, (TextDelta, AudioDelta, ToolCallDelta, Info))
        return FlowingResponse(self._chat_events(http, opened, chunks, spoken), EVENTS, self._settings.send_timeout_s)

    async def speech(self, http: HttpRequest) -> Response:
        """`POST /v1/audio/speech`."""
        speech = await self._read(http, SpeechRequest)
        http.state.naming = SPEECH_NAMES.told
        served_model(speech.model, self._settings.models)
        sound_format = speech_format(speech.response_format)
        # Drawn here where the caller gave none: sound has no place but its headers to tell it, and they come first.
        seed = secrets.randbits(DRAWN_SEED_BITS) if speech.seed is None else speech.seed
        request = await self._in_voice(speech_request(speech, self._settings.speech_prompt, http.state.request_id))
        opened = await self._open(http, traced(replace(request, seed=seed), http), (AudioDelta, Info))
        encoder, headers = SoundEncoder(sound_format, speech.speed or 1.0), {SEED_HEADER: str(seed)}
        if speech.stream_format == "sse":
            events = self._speech_events(http, opened, encoder, seed)
            return FlowingResponse(events, EVENTS, self._settings.send_timeout_s, headers)
        sound, headers = self._sound(http, opened, encoder), {**headers, "Trailer": END_TRAILER}
        return FlowingResponse(sound, MEDIA_TYPES[sound_format], self._settings.send_timeout_s, headers)

    async def _read(self, http: HttpRequest, schema: type[Schema]) -> Schema:
        settings = self._settings
        body = await read_body(http, settings.max_body_bytes, settings.body_timeout_s)
        if len(body) <= _PARSED_AT_ONCE:
            return parse(schema, body)
        return await asyncio.to_thread(parse, schema, body)

    def _spoken(self, chat: ChatRequest) -> Spoken:
        sound_format = chat_format(chat.audio, stream=bool(chat.stream))
        return Spoken(*self._transcripts.new_id(), sound_format)

    async def _open(self, http: HttpRequest, request: Request, kinds: tuple[type, ...]) -> Opened:
        """Wait for the first delta of these kinds: what is refused is answered by its status and not in a stream."""
        stream = self._pool.stream(request)
        return Opened(await until_gone(http.receive, _first(stream, kinds)), stream)

    async def _whole_chat(self, http: HttpRequest, request: Request, head: Head, spoken: Spoken | None) -> Response:
        async with self.counted(http, request) as stream:
            reply = await until_gone(http.receive, stream.collect())
        note_end(http, reply.info)
        if spoken is not None:
            self._transcripts.keep(spoken.audio_id, spoken.expires_at, reply.text)
        return JSONResponse(await asyncio.to_thread(completion, head, reply, spoken))

    async def _chat_events(
        self, http: HttpRequest, opened: Opened, chunks: ChatChunks, spoken: Spoken | None
    ) -> AsyncGenerator[bytes, None]:
        try:
            async with self._closing(http, opened.stream):
                yield chunks.begin()
                async for delta in opened.deltas():
                    # Encoding takes milliseconds, and must not hold up the speech of others.
                    is_sound = isinstance(delta, AudioDelta)
                    parts = await asyncio.to_thread(list, chunks.feed(delta)) if is_sound else chunks.feed(delta)
                    for part in parts:
                        yield part
        except OmniClientError as error:
            yield await self.failed(http, error)
            return
        finally:
            # Also of a reply that was cut off: the caller may go on from what it heard.
            if spoken is not None:
                self._transcripts.keep(spoken.audio_id, spoken.expires_at, chunks.text)
        note_end(http, chunks.info)
        for part in chunks.end():
            yield part

    async def _speech_events(
        self, http: HttpRequest, opened: Opened, encoder: SoundEncoder, seed: int
    ) -> AsyncGenerator[bytes, None]:
        info: Info | None = None
        try:
            async with self._closing(http, opened.stream):
                async for delta in opened.deltas():
                    if isinstance(delta, AudioDelta):
                        if data := await asyncio.to_thread(encoder.feed, delta.samples):
                            yield speech_delta(data)
                    elif isinstance(delta, Info):
                        info = delta
        except OmniClientError as error:
            yield await self.failed(http, error)
            return
        if rest := encoder.end():
            yield speech_delta(rest)
        note_end(http, info)
        yield speech_done(info, seed)

    async def _sound(self, http: HttpRequest, opened: Opened, encoder: SoundEncoder) -> AsyncGenerator[bytes, None]:
        try:
            async with self._closing(http, opened.stream):
                async for delta in opened.deltas():
                    if isinstance(delta, AudioDelta):
                        if data := await asyncio.to_thread(encoder.feed, delta.samples):
                            yield data
                    elif isinstance(delta, Info):
                        note_end(http, delta)
                        reason = finish_reason(delta).encode()
                        http.scope["state"].get(TRAILERS, []).append((END_TRAILER.encode(), reason))
        except OmniClientError as error:
            await self.failed(http, error)
            raise CutOff from error
        if rest := encoder.end():
            yield rest

    def counted(self, http: HttpRequest, request: Request) -> AbstractAsyncContextManager[PooledStream]:
        """Send a request; its stream is closed and counted at the end, which cancels what has not ended."""
        return self._closing(http, self._pool.stream(request))

    @asynccontextmanager
    async def _closing(self, http: HttpRequest, stream: PooledStream) -> AsyncIterator[PooledStream]:
        try:
            async with stream:
                yield stream
        finally:
            timings = stream.timings()
            self._metrics.replied(timings)
            note_times(http, timings)


async def _first(stream: PooledStream, kinds: tuple[type, ...]) -> Delta | None:
    """The first delta of these kinds, None where the reply has none; the others before it are dropped."""
    try:
        async for delta in stream:
            if isinstance(delta, kinds):
                return delta
    except BaseException:
        stream.close()
        raise
    return None


def traced(request: Request, http: HttpRequest) -> Request:
    """The request as a part of its caller's trace, which a header of W3C's names."""
    return replace(request, traceparent=http.headers.get("traceparent", "")[:_LONGEST_TRACEPARENT])
