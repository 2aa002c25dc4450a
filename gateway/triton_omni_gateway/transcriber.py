# SPDX-License-Identifier: Apache-2.0
"""Serves recordings that are to be written down or translated."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from triton_omni_client import OmniClientError

from .connection import FlowingResponse, until_gone
from .errors import GatewayError
from .field_names import RECORDING_NAMES
from .forms import FormModel, read_form
from .pool import PooledStream
from .replies import event
from .request_log import note_end, note_error
from .service import EVENTS, Gateway, traced
from .settings import GatewaySettings
from .speech_to_text import SpeechToText
from .transcription import Segment, Task, delta_event, done_event, listening_request, text_of, verbose, whole
from .translate import served_model

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

    def __init__(self, gateway: Gateway, settings: GatewaySettings, speech_to_text: SpeechToText) -> None:
        self._gateway = gateway
        self._settings = settings
        self._speech_to_text = speech_to_text

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
        _note_ends(asked.http, segments)
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
            _note_ends(http, segments)
            yield done_event(segments)

    def _pieces(self, asked: _Asked) -> AsyncGenerator[str | Segment, None]:
        def ask(sound: bytes, label: str) -> AbstractAsyncContextManager[PooledStream]:
            request = listening_request(sound, asked.prompt, label, temperature=asked.form.temperature)
            return self._gateway.counted(asked.http, traced(request, asked.http))

        return self._speech_to_text.pieces(asked.data, "file", asked.http.state.request_id, ask)


def _note_ends(http: HttpRequest, segments: list[Segment]) -> None:
    for segment in segments:
        note_end(http, segment.info)


def _prompt(deployment: str, form: TranslationRequest) -> str:
    return f"{deployment}\n\n{form.prompt}" if form.prompt else deployment
