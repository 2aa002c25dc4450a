# SPDX-License-Identifier: Apache-2.0
"""Serves recordings to be written down or translated: windows of them are asked for side by side, and told in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from triton_omni_client import Info, OmniClientError, Overloaded, Request, TextDelta

from .connection import FlowingResponse, until_gone
from .errors import GatewayError
from .field_names import RECORDING_NAMES
from .forms import FormModel, read_form
from .metrics import Metrics
from .recordings import Cutter, Window
from .replies import event
from .request_log import note_end, note_error
from .service import EVENTS, Gateway, traced
from .settings import GatewaySettings
from .transcription import Segment, Task, delta_event, done_event, listening_request, text_of, verbose, whole
from .translate import served_model

_TRIES = 20
"""How often a window after the first is asked for where the server has no free session: others of it are done."""
_TRY_AGAIN_MS = 1000
_EMPTY = Annotated[list[Any], Field(max_length=0)]


class TranslationRequest(FormModel):
    """The form of `POST /v1/audio/translations`, besides its `file`."""

    model: str
    prompt: str | None = None
    """What follows the deployment's prompt."""
    response_format: Literal["json", "text", "verbose_json"] = "json"
    temperature: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """None = the likeliest words."""


class TranscriptionRequest(TranslationRequest):
    """The form of `POST /v1/audio/transcriptions`, besides its `file`."""

    language: Annotated[str, Field(max_length=35)] | None = None
    """Told again in `verbose_json`: the model hears by itself what is spoken."""
    stream: bool = False
    timestamp_granularities: list[Literal["segment"]] | None = None
    chunking_strategy: Literal["auto"] | None = None
    include: _EMPTY | None = None


class _Listening(NamedTuple):
    """A window that is being asked for."""

    window: Window
    pieces: asyncio.Queue[str | None]
    """Its words as they come, and None at their end."""
    task: asyncio.Task[Info | None]
    """Returns the server's account, or raises why there is none."""


@dataclass(frozen=True)
class _Asked:
    """One request."""

    http: HttpRequest
    task: Task
    data: bytes
    prompt: str
    form: TranslationRequest


class Transcriber:
    """The two ways to have a recording's words; the methods raise `GatewayError`, `OmniClientError` or `ClientGone`."""

    def __init__(self, gateway: Gateway, settings: GatewaySettings, metrics: Metrics) -> None:
        self._gateway = gateway
        self._settings = settings
        self._metrics = metrics
        self._cutter = Cutter(
            settings.window_seconds,
            settings.max_recording_seconds,
            settings.recording_cpu_seconds,
            settings.recordings_at_once,
        )

    async def transcription(self, http: HttpRequest) -> Response:
        """`POST /v1/audio/transcriptions`."""
        form, data = await self._read(http, TranscriptionRequest)
        asked = _Asked(http, "transcribe", data, _prompt(self._settings.transcription_prompt, form), form)
        if not form.stream:
            return await self._whole(asked, form.language)
        pieces = self._pieces(asked)
        first = await until_gone(http.receive, anext(pieces))
        return FlowingResponse(self._events(http, first, pieces), EVENTS, self._settings.send_timeout_s)

    async def translation(self, http: HttpRequest) -> Response:
        """`POST /v1/audio/translations`."""
        form, data = await self._read(http, TranslationRequest)
        asked = _Asked(http, "translate", data, _prompt(self._settings.translation_prompt, form), form)
        return await self._whole(asked, "english")

    async def _read(self, http: HttpRequest, schema: type[Any]) -> tuple[Any, bytes]:
        http.state.naming = RECORDING_NAMES.told
        settings = self._settings
        form, data = await read_form(http, schema, settings.max_body_bytes, settings.body_timeout_s)
        served_model(form.model, settings.models)
        return form, data

    async def _whole(self, asked: _Asked, language: str | None) -> Response:
        segments = await until_gone(asked.http.receive, self._segments(asked))
        match asked.form.response_format:
            case "text":
                return PlainTextResponse(text_of(segments) + "\n")
            case "verbose_json":
                return JSONResponse(verbose(segments, asked.task, language, asked.form.temperature))
        return JSONResponse(whole(segments))

    async def _segments(self, asked: _Asked) -> list[Segment]:
        async with aclosing(self._pieces(asked)) as pieces:
            segments = [piece async for piece in pieces if isinstance(piece, Segment)]
        self._ended(asked.http, segments)
        return segments

    async def _events(
        self, http: HttpRequest, first: str | Segment, pieces: AsyncGenerator[str | Segment, None]
    ) -> AsyncGenerator[bytes, None]:
        segments: list[Segment] = []
        try:
            async with aclosing(pieces):
                piece: str | Segment | None = first
                while piece is not None:
                    if isinstance(piece, Segment):
                        segments.append(piece)
                    else:
                        yield delta_event(piece)
                    piece = await anext(pieces, None)
        except OmniClientError as error:
            yield await self._gateway.failed(http, error)
        except GatewayError as error:  # of a file that is damaged after its begin
            http.scope["state"]["status"] = error.status
            note_error(http.scope, error)
            yield event(error.body())
        else:
            self._ended(http, segments)
            yield done_event(segments)

    def _ended(self, http: HttpRequest, segments: list[Segment]) -> None:
        self._metrics.recorded.inc(segments[-1].end)
        for segment in segments:
            note_end(http, segment.info)

    async def _pieces(self, asked: _Asked) -> AsyncGenerator[str | Segment, None]:
        """All words in order as they come, and each window's segment after its words."""
        said = False
        async with aclosing(self._listenings(asked)) as listenings:
            async for one in listenings:
                texts: list[str] = []
                while (text := await one.pieces.get()) is not None:
                    piece = text if texts else text.lstrip()
                    if piece:
                        texts.append(f" {piece}" if said and not texts else piece)
                        yield texts[-1]
                said = said or bool(texts)
                yield Segment(one.window.begin, one.window.end, "".join(texts), await one.task)

    async def _listenings(self, asked: _Asked) -> AsyncGenerator[_Listening, None]:
        """The windows in order, the next ones being asked for; what is not used to its end is cancelled."""
        under_way: deque[_Listening] = deque()
        count = 0
        try:
            async with aclosing(self._cutter.windows(asked.data)) as windows:
                async for window in windows:
                    under_way.append(self._begin(asked, window, count))
                    count += 1
                    if len(under_way) == self._settings.windows_at_once:
                        yield under_way[0]
                        under_way.popleft()
            while under_way:
                yield under_way[0]
                under_way.popleft()
        finally:
            for one in under_way:
                one.task.cancel()
            await asyncio.gather(*(one.task for one in under_way), return_exceptions=True)

    def _begin(self, asked: _Asked, window: Window, number: int) -> _Listening:
        state = asked.http.state
        label = f"{state.request_id}.{number}" if number else state.request_id
        request = listening_request(window.data, asked.prompt, label, temperature=asked.form.temperature)
        pieces: asyncio.Queue[str | None] = asyncio.Queue()
        listening = self._listen(asked.http, traced(request, asked.http), pieces, _TRIES if number else 1)
        return _Listening(window, pieces, asyncio.create_task(listening))

    async def _listen(
        self, http: HttpRequest, request: Request, pieces: asyncio.Queue[str | None], tries: int
    ) -> Info | None:
        """Put the words of a window into `pieces`, and None at their end, whatever it is."""
        try:
            while True:
                tries -= 1
                try:
                    return await self._hear(http, request, pieces)
                except Overloaded as error:
                    if not tries:
                        raise
                    await asyncio.sleep((error.retry_after_ms or _TRY_AGAIN_MS) / 1000)
        finally:
            pieces.put_nowait(None)

    async def _hear(self, http: HttpRequest, request: Request, pieces: asyncio.Queue[str | None]) -> Info | None:
        info: Info | None = None
        async with self._gateway.counted(http, request) as stream:
            async for delta in stream:
                if isinstance(delta, TextDelta):
                    pieces.put_nowait(delta.text)
                elif isinstance(delta, Info):
                    info = delta
        return info


def _prompt(deployment: str, form: TranslationRequest) -> str:
    return f"{deployment}\n\n{form.prompt}" if form.prompt else deployment
