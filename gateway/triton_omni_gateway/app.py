# SPDX-License-Identifier: Apache-2.0
"""The ASGI application: routes, and errors in OpenAI's form."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from triton_omni_client import OmniClientError

from .browser_page import add_page
from .connection import CLIENT_GONE
from .errors import SOON, ClientGone, GatewayError
from .forms import FORM
from .gate import Gate, error_response
from .keys import ApiKeys
from .metrics import Metrics
from .pool import ServerPool
from .realtime.door import PATH
from .realtime.endpoint import add_realtime
from .realtime.secrets import ClientSecrets
from .request_log import note_error
from .schemas import ChatRequest, SpeechRequest
from .service import Gateway
from .settings import ANY_END, GatewaySettings
from .speech_to_text import SpeechToText
from .transcriber import Transcriber, TranscriptionRequest, TranslationRequest
from .transcripts import Transcripts
from .translate import served_model

_BODIES: tuple[type[BaseModel], ...] = (ChatRequest, SpeechRequest, TranscriptionRequest, TranslationRequest)
_SCHEMAS = "#/components/schemas/"
_SHOWN = 80
"""Characters of a method or path in a refusal."""
_TOLD_TO_PAGES = ("retry-after", "retry-after-ms", "x-request-id", "x-seed")
"""Headers of an answer that a page of another origin may read."""
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class GatewayApp(FastAPI):
    """The application, whose handlers read bodies by themselves, under its limits; OpenAPI is told of their types."""

    def openapi(self) -> dict[str, Any]:
        """FastAPI's description, with the types that it cannot see; made once, for it takes 30 ms."""
        is_new = self.openapi_schema is None
        described = super().openapi()
        if is_new:
            _, found = models_json_schema([(kind, "validation") for kind in _BODIES], ref_template=_SCHEMAS + "{model}")
            described.setdefault("components", {}).setdefault("schemas", {}).update(found["$defs"])
        return described


def create_app(settings: GatewaySettings, keys: ApiKeys | None = None) -> FastAPI:
    """The gateway of some Triton servers; its connections live from the application's start-up to its shutdown.

    Args:
        settings: where the servers are, and the limits.
        keys: who may call `/v1/`; None = everybody.
    """
    metrics = Metrics()
    transcripts = Transcripts(settings.max_transcripts, settings.transcript_seconds)
    pool = ServerPool(settings.triton_urls, metrics.moved.inc, metrics.servers_ready.set)
    speech_to_text = SpeechToText(settings, metrics.recorded.inc)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with pool.running():
            app.state.gateway = Gateway(settings, pool, transcripts, metrics)
            app.state.transcriber = Transcriber(app.state.gateway, settings, speech_to_text)
            yield

    # Its pages of documentation would load scripts from elsewhere.
    app = GatewayApp(title="triton-omni gateway", lifespan=lifespan, docs_url=None, redoc_url=None)
    _add_model_routes(app)
    _add_recording_routes(app)
    _add_list_routes(app, settings)
    _add_voice_route(app, settings)
    _add_operator_routes(app, metrics)
    add_page(app)
    keys = keys or ApiKeys()
    secrets = ClientSecrets(keys)
    add_realtime(app, settings, secrets, metrics, speech_to_text)
    _add_errors(app)
    paths = frozenset(path for route in app.routes if (path := getattr(route, "path", None)))
    app.add_middleware(Gate, settings=settings, keys=keys, metrics=metrics, endpoints=paths, secrets=secrets)
    if settings.origins:
        # Around the gate: a browser asks without a key whether it may ask.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=_TOLD_TO_PAGES,
        )
    return app


def _gateway(request: Request) -> Gateway:
    return cast(Gateway, request.app.state.gateway)


def _body_of(schema: type[BaseModel], media_type: str = "application/json") -> dict[str, Any]:
    content = {media_type: {"schema": {"$ref": f"{_SCHEMAS}{schema.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


def _add_model_routes(app: FastAPI) -> None:
    @app.post("/v1/chat/completions", openapi_extra=_body_of(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """A reply to a chat, as text or as text and speech, whole or streamed."""
        return await _gateway(request).chat(request)

    @app.post("/v1/audio/speech", openapi_extra=_body_of(SpeechRequest))
    async def audio_speech(request: Request) -> Response:
        """A text read aloud by the model, streamed."""
        return await _gateway(request).speech(request)


def _add_recording_routes(app: FastAPI) -> None:
    def transcriber(request: Request) -> Transcriber:
        return cast(Transcriber, request.app.state.transcriber)

    @app.post("/v1/audio/transcriptions", openapi_extra=_body_of(TranscriptionRequest, FORM))
    async def transcriptions(request: Request) -> Response:
        """The words of a recording, whole or streamed."""
        return await transcriber(request).transcription(request)

    @app.post("/v1/audio/translations", openapi_extra=_body_of(TranslationRequest, FORM))
    async def translations(request: Request) -> Response:
        """What a recording says, in English."""
        return await transcriber(request).translation(request)


def _add_list_routes(app: FastAPI, settings: GatewaySettings) -> None:
    created = int(time.time())
    whole = [name for name in settings.models if not name.endswith(ANY_END)]

    async def told(request: Request, names: Iterable[str]) -> list[dict[str, Any]]:
        voices = await _gateway(request).voices()
        known = {} if voices is None else {"voices": voices}
        facts = {"object": "model", "created": created, "owned_by": "triton-omni", **known}
        return [{"id": name, **facts} for name in names]

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        """The names that `model` may have, with the voices that each speaks in."""
        return {"object": "list", "data": await told(request, whole)}

    @app.get("/v1/models/{name:path}")
    async def one_model(request: Request, name: str) -> dict[str, Any]:
        """One of them."""
        return (await told(request, [served_model(name, settings.models)]))[0]


def _add_voice_route(app: FastAPI, settings: GatewaySettings) -> None:
    @app.get("/v1/audio/voices")
    async def voices(request: Request) -> dict[str, Any]:
        """The checkpoint's voices, and the other names that `voice` may have, with the voice that each means."""
        own = await _gateway(request).voices() or []
        first = own[0] if own else None
        others = {name: voice or first for name, voice in settings.voices.items() if name not in own}
        return {"object": "list", "voices": own, "aliases": others}


def _add_operator_routes(app: FastAPI, metrics: Metrics) -> None:
    @app.get("/health/live")
    async def live() -> dict[str, str]:
        """Answer 200: this process is alive."""
        return {"status": "live"}

    @app.get("/health")
    @app.get("/health/ready")
    async def health(request: Request) -> Response:
        """Answer 200 if a Triton server takes requests, else 503."""
        if await _gateway(request).ready():
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "no Triton server is ready"}, 503, SOON)

    @app.get("/metrics")
    async def figures() -> Response:
        """The gateway's figures for Prometheus."""
        return Response(metrics.text(), media_type=_METRICS_TYPE)


def _served(app: FastAPI) -> list[str]:
    """Methods and paths for programs."""
    routes = (route for route in app.routes if isinstance(route, APIRoute) and route.include_in_schema)
    return [*(f"{method} {route.path}" for route in routes for method in sorted(route.methods)), f"WebSocket {PATH}"]


def _add_errors(app: FastAPI) -> None:
    def told(request: Request, error: GatewayError) -> Response:
        note_error(request.scope, error)
        return error_response(error)

    @app.exception_handler(GatewayError)
    async def refused(request: Request, error: GatewayError) -> Response:
        return told(request, error)

    @app.exception_handler(OmniClientError)
    async def failed(request: Request, error: OmniClientError) -> Response:
        return told(request, await _gateway(request).meaning(request, error))

    @app.exception_handler(ClientGone)
    async def gone(_request: Request, _error: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE)  # for the logs: nobody reads it

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        asked = ascii(f"{request.method[:_SHOWN]} {request.url.path[:_SHOWN]}")[1:-1]
        said = f"Invalid URL ({asked}): {error.detail}; this gateway has {', '.join(_served(app))}."
        return told(request, GatewayError(error.status_code, said, headers=error.headers or {}))
