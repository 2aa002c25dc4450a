# SPDX-License-Identifier: Apache-2.0
"""The log and the metrics tell how the responses of realtime sessions ended, and why the gateway ended a session."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from client_fakes import INFO, FakeTriton, chunk, failure, final
from gateway_command import started
from gateway_fakes import TIMEOUT_S, Lines, RunningGateway, run_gateway
from realtime_client import MANUAL, greeting, talk
from triton_omni_gateway.realtime.limits import RealtimeLimits
from triton_omni_gateway.request_log import REQUESTS


@pytest.fixture
def gateway(triton: FakeTriton, lines: Lines) -> Iterator[RunningGateway]:
    with run_gateway(triton.url, log_level="info") as running:
        logging.getLogger(REQUESTS).addHandler(lines)
        yield running


ENDINGS = {
    ("completed", "stop"): greeting,
    ("incomplete", "max_output_tokens"): lambda *_: iter([chunk(text="Hello"), chunk(info=INFO), final()]),
    ("failed", "overloaded"): lambda *_: iter([failure("no free session [omni:overloaded;stage=thinker]")]),
    ("failed", "internal"): lambda *_: iter([chunk(text="Hello"), failure("broken [omni:internal]")]),
}
RESPONSES = "omni_gateway_realtime_responses_total"


async def test_a_response_of_a_session_has_a_line_and_is_counted(
    triton: FakeTriton, gateway: RunningGateway, lines: Lines
) -> None:
    ids = []
    async with talk(gateway.base, audio=MANUAL["audio"]) as session:
        for script in ENDINGS.values():
            triton.script = script
            ids.append((await session.asked("response.create", "response.done")).response.id)
        triton.script = triton.endless
        await session.send("response.create")
        await session.until("response.output_audio.delta")
        ids.append((await session.asked("response.cancel", "response.done")).response.id)
        triton.cancelled.clear()
        ids.append((await session.asked("response.create", "response.created")).response.id)
        await session.until("response.output_audio.delta")
    whole = await lines.of_session()
    told = lines.all[:-1]
    ends = [*ENDINGS, ("cancelled", "client_cancelled"), ("cancelled", "session_ended")]
    assert lines.all[-1] is whole
    assert [record.response for record in told] == ids
    assert [(record.response_status, record.reason) for record in told] == ends
    assert {record.request for record in told} == {whole.request}
    assert 0 <= told[0].first_text <= told[0].first_audio <= told[0].seconds
    assert not hasattr(told[2], "first_text")
    begin = f"request={whole.request} response={ids[0]} response_status=completed reason=stop seconds="
    assert told[0].getMessage().startswith(begin)
    for status, reason in ends:
        assert gateway.metric(f'{RESPONSES}{{reason="{reason}",status="{status}"}}') == 1


async def stall(socket: Any, triton: FakeTriton, _gateway: RunningGateway) -> None:
    """Take nothing of a reply."""

    def loud(_request: Any, context: Any) -> Iterator[Any]:
        while context.is_active():
            yield chunk(audio=np.zeros(24_000, np.float32))

    triton.script = loud
    await socket.send(json.dumps({"type": "response.create"}))


async def break_frames(socket: Any, _triton: FakeTriton, _gateway: RunningGateway) -> None:
    socket.transport.write(b"no frame")


async def answer_no_ping(socket: Any, _triton: FakeTriton, _gateway: RunningGateway) -> None:
    socket.transport.pause_reading()


async def send_too_much(socket: Any, _triton: FakeTriton, _gateway: RunningGateway) -> None:
    await socket.send("x" * 100_000)


async def send_in_pieces(socket: Any, _triton: FakeTriton, _gateway: RunningGateway) -> None:
    with suppress(ConnectionClosed):  # before the last ones
        await socket.send(["x"] * 17_000)


async def stop(_socket: Any, _triton: FakeTriton, gateway: RunningGateway) -> None:
    gateway.stop()


async def wait(*_: Any) -> None:
    """Its time runs out."""


FORCED: dict[str, tuple[Callable[..., Awaitable[None]], dict[str, Any]]] = {
    "session_expired": (wait, {"realtime": RealtimeLimits(session_seconds=0.1)}),
    "caller_stalled": (stall, {"send_timeout_s": 0.2}),
    "event_too_large": (send_too_much, {"realtime": RealtimeLimits(max_event_bytes=10_000)}),
    "too_many_fragments": (send_in_pieces, {}),
    "protocol_error": (break_frames, {}),
    "no_pong": (answer_no_ping, {"realtime": RealtimeLimits(ping_seconds=0.1)}),
    "stopping": (stop, {}),
}


@pytest.mark.parametrize("reason", FORCED)
async def test_the_line_of_a_session_that_the_gateway_ends_says_why(
    triton: FakeTriton, lines: Lines, reason: str
) -> None:
    end, settings = FORCED[reason]
    with run_gateway(triton.url, log_level="info", **settings) as gateway:
        logging.getLogger(REQUESTS).addHandler(lines)
        url = f"{gateway.base.replace('http', 'ws')}/v1/realtime"
        async with connect(url, max_queue=1, ping_interval=None, close_timeout=0.1) as socket:
            await end(socket, triton, gateway)
            line = await lines.of_session()
    assert (line.status, line.reason) == (101, reason)


async def test_a_session_s_lines_are_json_too(triton: FakeTriton) -> None:
    with started(triton, "--log-format", "json") as process:
        assert process.stdout is not None
        base = process.stdout.readline().split("=")[1].split("/v1")[0]
        async with talk(base, audio=MANUAL["audio"]) as session:
            done = (await session.asked("response.create", "response.done")).response
            process.send_signal(signal.SIGTERM)
            assert (await session.until("error")).error.code == "stopping"
        written = [json.loads(line) for line in process.communicate(timeout=TIMEOUT_S)[1].splitlines() if "{" in line]
    response, whole = [found for found in written if found["logger"] == REQUESTS]
    assert (response["response"], response["request"]) == (done.id, whole["request"])
    assert (response["response_status"], response["reason"]) == ("completed", "stop")
    assert {"seconds", "first_text", "first_audio", "time"} <= response.keys()
    assert (whole["status"], whole["reason"]) == (101, "stopping")
