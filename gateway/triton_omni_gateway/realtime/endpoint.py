# SPDX-License-Identifier: Apache-2.0
"""The paths under `/v1/realtime`: sessions over WebSockets, and client secrets."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from triton_omni_gateway.connection import read_body
from triton_omni_gateway.errors import RATE, GatewayError, overloaded
from triton_omni_gateway.gate import refuse
from triton_omni_gateway.metrics import Metrics
from triton_omni_gateway.request_log import note_forced_end
from triton_omni_gateway.schemas import parse
from triton_omni_gateway.settings import GatewaySettings
from triton_omni_gateway.speech_to_text import SpeechToText
from triton_omni_gateway.translate import served_model

from .config import Json, given_of
from .door import PATH, SUBPROTOCOL
from .event_queue import EventQueue
from .events import WrongEvent, error_event, new_id, read_event, written
from .limits import RealtimeLimits
from .secrets import ClientSecrets, SecretRequest
from .session import Session, checked_config
from .smart_turn import SmartTurn

_PARSED_AT_ONCE = 1 << 18
"""Characters of an event that is parsed in a millisecond or so."""
_EXPIRED = 1001
_UPGRADE = {"Upgrade": "websocket", "Connection": "Upgrade"}


class Realtime:
    """The sessions of a gateway.

    Args:
        settings: of the gateway.
        secrets: whose sessions begin configured.
        metrics: where sessions are counted.
        speech_to_text: writes down what users say.
    """

    def __init__(
        self, settings: GatewaySettings, secrets: ClientSecrets, metrics: Metrics, speech_to_text: SpeechToText
    ) -> None:
        self._settings = settings
        self._secrets = secrets
        self._metrics = metrics
        self._speech_to_text = speech_to_text
        self._smart_turn = SmartTurn()
        self._open = 0

    @property
    def _limits(self) -> RealtimeLimits:
        return self._settings.realtime

    async def serve(self, socket: WebSocket) -> None:
        """A session, from its beginning to its end; one that cannot be is refused in OpenAI's form."""
        try:
            given = self._first_config(socket)
            if self._open >= self._limits.max_sessions:
                said = f"this gateway has {self._limits.max_sessions} realtime sessions, its limit, already"
                raise overloaded(f"{said}; try again later.")
        except GatewayError as error:
            await refuse(socket, error)
            return
        self._count(1)
        try:
            await socket.accept(SUBPROTOCOL if SUBPROTOCOL in socket.scope["subprotocols"] else None)
            await self._hold(socket, given)
        finally:
            self._count(-1)

    def _first_config(self, socket: WebSocket) -> Json:
        """The configuration that a session begins with: a client secret's, else what the address says.

        Raises:
            GatewayError: there is no such model, or another gateway's secret asks for what this one has not.
        """
        secret: Json = socket.scope["state"]["session"]
        kind = secret.get("type", "realtime") if secret else socket.query_params.get("intent")
        if kind == "transcription":
            # The address may name OpenAI's models, as `transcription` may.
            given = {"type": "transcription", **secret}
        else:
            model = socket.query_params.get("model") or self._settings.models[0]
            given = {"model": served_model(model, self._settings.models), **secret}
        checked_config(given, self._settings.models, self._limits)
        return given

    def _count(self, change: int) -> None:
        self._open += change
        self._metrics.sessions.set(self._open)

    async def _hold(self, socket: WebSocket, given: Json) -> None:
        queue = EventQueue(socket.send_text, self._settings.send_timeout_s, self._limits)
        session = Session(
            socket.app.state.gateway,
            self._limits,
            queue,
            smart_turn=self._smart_turn,
            speech_to_text=self._speech_to_text,
            transcription_prompt=self._settings.transcription_prompt,
            models=self._settings.models,
            given=given,
        )
        sending = asyncio.create_task(queue.run())
        reading = asyncio.create_task(_read(socket, session, queue))
        try:
            await asyncio.wait(
                (sending, reading), timeout=self._limits.session_seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            session.close()
            is_expired = not (sending.done() or reading.done())
            sending.cancel()
            reading.cancel()
            unsent, fault, _ = await asyncio.gather(sending, reading, session.closed(), return_exceptions=True)
        if is_expired:
            await self._expire(socket)
        elif isinstance(unsent, TimeoutError):
            note_forced_end(socket.scope, "caller_stalled")
        elif isinstance(fault, Exception):
            raise fault

    async def _expire(self, socket: WebSocket) -> None:
        minutes = self._limits.session_seconds / 60
        said = f"The session has lasted {minutes:g} minutes, its limit: open another one."
        error = GatewayError(429, said, RATE, "session_expired")
        note_forced_end(socket.scope, "session_expired")
        with contextlib.suppress(TimeoutError, WebSocketDisconnect):
            async with asyncio.timeout(self._settings.send_timeout_s):
                await socket.send_text(written(error_event(error)))
                await socket.close(_EXPIRED, "session_expired")

    async def make_secret(self, request: Request) -> Response:
        """`POST /v1/realtime/client_secrets`."""
        body = await read_body(request, self._limits.max_event_bytes, self._settings.body_timeout_s)
        asked = parse(SecretRequest, body or b"{}")
        given = {**given_of(asked.session), "type": asked.session.type}
        config = checked_config(given, self._settings.models, self._limits)
        value, made = self._secrets.make(request.state.caller, given, asked.expires_after.seconds)
        session = {"object": config.object_name, "id": new_id("sess"), **config.told()}
        return JSONResponse({"value": value, "expires_at": made.expires_at, "session": session})


async def _read(socket: WebSocket, session: Session, queue: EventQueue) -> None:
    """Take the client's events until it leaves."""
    session.begin()
    while True:
        await queue.room(of_client=True)
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            return
        await _handle_message(session, queue, message["bytes"])
        await asyncio.sleep(0)  # many that are there already must not hold others up


async def _handle_message(session: Session, queue: EventQueue, text: bytes) -> None:
    event_id = None
    try:
        event = await asyncio.to_thread(read_event, text) if len(text) > _PARSED_AT_ONCE else read_event(text)
        event_id = event.event_id
        await session.take(event)
    except WrongEvent as error:
        queue.put(error_event(error, error.event_id))
    except GatewayError as error:
        queue.put(error_event(error, event_id))


def add_realtime(
    app: FastAPI,
    settings: GatewaySettings,
    secrets: ClientSecrets,
    metrics: Metrics,
    speech_to_text: SpeechToText,
) -> None:
    """Serve the Realtime API."""
    realtime = Realtime(settings, secrets, metrics, speech_to_text)

    @app.websocket(PATH)
    async def session(socket: WebSocket) -> None:
        await realtime.serve(socket)

    @app.websocket("/{path:path}")
    async def other(socket: WebSocket) -> None:
        said = f"Invalid URL (WebSocket {ascii(socket.url.path[:80])[1:-1]}): WebSockets are served at {PATH}."
        await refuse(socket, GatewayError(404, said))

    @app.get(PATH, include_in_schema=False)
    async def no_session() -> Any:
        """Realtime sessions, which are WebSockets: any other request is answered with 426."""
        said = f"{PATH} is a WebSocket: connect to ws://HOST:PORT{PATH}?model={settings.models[0]} with an upgrade."
        raise GatewayError(426, said, code="upgrade_required", headers=_UPGRADE)

    @app.post(f"{PATH}/client_secrets")
    async def client_secrets(request: Request) -> Response:
        """A secret by which a client of the caller's opens sessions for a while."""
        return await realtime.make_secret(request)
