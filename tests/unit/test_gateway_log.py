# SPDX-License-Identifier: Apache-2.0
"""Each request has one line in the gateway's log, with its id, key, end and times; no line of a request is without."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from client_fakes import INFO, FakeTriton, chunk, failure, final, serve_grpc
from gateway_command import FOLDERS, started
from gateway_fakes import MODEL, TIMEOUT_S, USER, Lines, RunningGateway, run_gateway
from media_samples import audio_file
from realtime_client import talk
from triton_omni_gateway.gate import Gate
from triton_omni_gateway.keys import ApiKeys, read_keys
from triton_omni_gateway.metrics import Metrics
from triton_omni_gateway.realtime.secrets import ClientSecrets
from triton_omni_gateway.request_log import REQUESTS
from triton_omni_gateway.settings import GatewaySettings

CHAT = "/v1/chat/completions"
SPEECH = "/v1/audio/speech"
SOUND = np.full(480, 0.25, np.float32)


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton()) as fake:
        yield fake


@pytest.fixture
def gateway(triton: FakeTriton, lines: Lines) -> Iterator[RunningGateway]:
    keys = ApiKeys(["first alice", "second"])
    with run_gateway(triton.url, keys=keys, log_level="info") as running:
        logging.getLogger(REQUESTS).addHandler(lines)
        yield running


def ask(gateway: RunningGateway, body: Any, path: str = CHAT, key: str = "first") -> httpx.Response:
    return gateway.post({"model": MODEL, **body}, path, headers={"Authorization": f"Bearer {key}"})


def test_a_reply_s_line_has_its_id_key_end_and_times(gateway: RunningGateway, lines: Lines) -> None:
    answers = [ask(gateway, {"messages": USER, "stream": stream}) for stream in (False, True)]
    answers.append(ask(gateway, {"input": "hi"}, SPEECH, key="second"))
    gateway.wait_for_metric(f'omni_gateway_requests_total{{endpoint="{SPEECH}",status="200"}}', 1)
    told = lines.records
    assert [record.request for record in told] == [answer.headers["x-request-id"] for answer in answers]
    assert [(record.path, record.status) for record in told] == [(CHAT, 200), (CHAT, 200), (SPEECH, 200)]
    assert [record.key for record in told[:2]] == ["alice"] * 2
    assert told[2].key.startswith("key-")
    for record in told:
        assert (record.reason, record.cut_by) == ("length", "talker")  # as INFO of the scripted server says
        assert 0 <= record.first_text <= record.first_audio <= record.seconds
        assert record.getMessage().startswith(f"request={record.request} method=POST path={record.path} status=200 ")


@pytest.mark.parametrize(
    ("reasons", "told"),
    [
        ({"thinker": "stop", "talker": "stop"}, ("stop", None)),
        ({"thinker": "length", "talker": "stop"}, ("length", "thinker")),
        ({"thinker": "length", "talker": "length"}, ("length", "thinker,talker")),
    ],
)
def test_why_speech_ended_is_told(
    triton: FakeTriton, gateway: RunningGateway, lines: Lines, reasons: dict[str, str], told: tuple[str, str | None]
) -> None:
    info = {**INFO, "finish_reason": reasons}
    triton.script = lambda *_: iter([chunk(text="Hello", audio=SOUND), chunk(info=info), final()])
    ask(gateway, {"input": "hi"}, SPEECH)
    gateway.wait_for_metric(f'omni_gateway_requests_total{{endpoint="{SPEECH}",status="200"}}', 1)
    assert (lines.records[0].reason, getattr(lines.records[0], "cut_by", None)) == told


def test_refusals_and_failures_say_why(triton: FakeTriton, gateway: RunningGateway, lines: Lines) -> None:
    ask(gateway, {"messages": USER}, key="third")
    ask(gateway, {"messages": USER, "nonsense": 1})
    triton.script = lambda *_: iter([chunk(text="so far"), failure("broken [omni:internal]")])
    ask(gateway, {"messages": USER, "stream": True})
    gateway.wait_for_metric(f'omni_gateway_requests_total{{endpoint="{CHAT}",status="500"}}', 1)
    told = [(record.status, record.reason) for record in lines.records]
    assert told == [(401, "invalid_api_key"), (400, "unknown_parameter"), (500, "internal")]


def test_a_recording_s_line_has_its_end(triton: FakeTriton, gateway: RunningGateway, lines: Lines) -> None:
    gateway.openai.with_options(api_key="first").audio.transcriptions.create(
        model=MODEL, file=("said.wav", audio_file("wav"))
    )
    path = "/v1/audio/transcriptions"
    gateway.wait_for_metric(f'omni_gateway_requests_total{{endpoint="{path}",status="200"}}', 1)
    assert (lines.records[0].path, lines.records[0].reason, lines.records[0].key) == (path, "length", "alice")


def test_a_caller_that_leaves_is_told_apart(triton: FakeTriton, gateway: RunningGateway, lines: Lines) -> None:
    triton.script = triton.endless
    body = json.dumps({"model": MODEL, "messages": USER, "stream": True})
    headers = {"Content-Type": "application/json", "Authorization": "Bearer first"}
    with gateway.http.stream("POST", CHAT, content=body, headers=headers) as answer:
        next(answer.iter_bytes())
    gateway.wait_for_metric(f'omni_gateway_requests_total{{endpoint="{CHAT}",status="499"}}', 1)
    assert (lines.records[0].status, lines.records[0].reason) == (499, "caller_left")


def test_a_caller_s_text_cannot_begin_a_line(gateway: RunningGateway, lines: Lines) -> None:
    gateway.http.post("/v1/a%0Arequest=forged%1b[2J")
    gateway.wait_for_metric('omni_gateway_requests_total{endpoint="other",status="401"}', 1)
    assert lines.records[0].getMessage().count("\n") == 0
    assert r"path=/v1/a\nrequest=forged\x1b[2J" in lines.records[0].getMessage()


def test_every_line_of_a_request_has_its_id_as_json_too() -> None:
    with (
        serve_grpc(FakeTriton(script=lambda *_: iter([failure("broken")]))) as triton,
        started(triton, "--log-format", "json") as process,
    ):
        assert process.stdout is not None
        base = process.stdout.readline().split("=")[1].split("/v1")[0]
        answer = httpx.post(base + CHAT, json={"model": MODEL, "messages": USER}, timeout=TIMEOUT_S)
        process.send_signal(signal.SIGTERM)
        written = [json.loads(line) for line in process.communicate(timeout=TIMEOUT_S)[1].splitlines() if "{" in line]
    request_id = answer.headers["x-request-id"]
    (line,) = [found for found in written if found["logger"] == REQUESTS]
    assert (line["request"], line["status"], line["reason"], line["level"]) == (request_id, 500, "internal", "INFO")
    assert {"time", "seconds", "peer", "path", "method"} <= line.keys()
    causes = [found["message"] for found in written if "broken" in found["message"]]
    assert causes
    assert all(request_id in cause for cause in causes)


def test_a_key_may_have_a_name(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("one  the team of Ada\ntwo\n")
    keys = read_keys({"OMNI_API_KEYS": "three bob, four"}, file)
    callers = {key: keys.caller(f"Bearer {key}") for key in ("one", "two", "three", "four")}
    assert all(callers.values())
    assert [keys.name_of(callers[key]) for key in ("one", "three")] == ["the team of Ada", "bob"]
    unnamed = {keys.name_of(callers[key]) for key in ("two", "four")}
    assert len(unnamed) == 2
    assert not any(key in name for name in unnamed for key in ("two", "four"))
    assert keys.name_of("") == ""


async def test_a_session_has_a_line_at_its_end_and_a_refused_one_too(gateway: RunningGateway, lines: Lines) -> None:
    async with talk(gateway.base, key="first"):
        assert lines.all == []
    refused = []
    for options in ({"key": "third"}, {"key": "first", "model": "none"}):
        with pytest.raises(InvalidStatus) as refusal:
            async with talk(gateway.base, **options):
                pass
        refused.append(refusal.value.response.headers["x-request-id"])
    while len(lines.all) < 3:
        await asyncio.sleep(0.01)
    told = [(one.path, one.status, getattr(one, "reason", None), getattr(one, "key", None)) for one in lines.all]
    assert told == [
        ("/v1/realtime", 101, None, "alice"),
        ("/v1/realtime", 401, "invalid_api_key", None),
        ("/v1/realtime", 404, "model_not_found", "alice"),
    ]
    assert [one.request for one in lines.all[1:]] == refused
    assert {one.method for one in lines.all} == {"WebSocket"}


async def test_no_line_about_a_caller_is_without_an_id_or_an_address(triton: FakeTriton) -> None:
    """What is no HTTP, an upgrade that is unknown, a socket that is none, an answer that is cut off."""
    triton.script = lambda *_: iter([chunk(text="so far", audio=SOUND), failure("broken [omni:internal]")])
    with started(triton, "--max-connections", "4") as process:
        assert process.stdout is not None
        base = process.stdout.readline().split("=")[1].split("/v1")[0]
        answer = exchanged(base, b"no HTTP\r\n\r\n")
        exchanged(
            base, b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nUpgrade: h2c\r\nConnection: close, Upgrade\r\n\r\n"
        )
        exchanged(
            base, b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
        )
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.post(base + SPEECH, json={"model": MODEL, "input": "hi", "response_format": "wav"}, timeout=TIMEOUT_S)
        async with talk(base) as session:
            session.connection._connection.transport.write(b"no frame")
            with pytest.raises(ConnectionClosedError):
                await session.connection.recv()
        with ExitStack() as held:
            for _ in range(6):
                held.enter_context(connected(base))
            assert httpx.get(f"{base}/health/live", timeout=TIMEOUT_S).status_code == 200
        process.send_signal(signal.SIGTERM)
        written = process.communicate(timeout=TIMEOUT_S)[1].splitlines()
    (request_id,) = re.findall(rb"x-request-id: (req_[0-9a-f]{24})", answer)
    (line,) = [line for line in written if request_id.decode() in line]
    assert re.search(r"method=- path=- status=400 reason=invalid_request_error peer=127\.0\.0\.1 seconds=0", line)
    own = r"Started server|Waiting for|Application (startup|shutdown)|Uvicorn running|Shutting down|Finished server"
    about_callers = [line for line in written if not re.search(rf"{own}|without API keys", line)]
    assert len(about_callers) >= 8
    assert [line for line in about_callers if not re.search(r"req_[0-9a-f]{24}|of 127\.0\.0\.1", line)] == []


async def test_a_socket_that_fails_before_it_is_one_has_the_status_of_a_fault(lines: Lines) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    async def unused(*_: Any) -> Any:
        raise AssertionError

    gate = Gate(
        broken,
        settings=GatewaySettings(triton_urls=("localhost:1",)),
        keys=ApiKeys([]),
        metrics=Metrics(),
        endpoints=frozenset(),
        secrets=ClientSecrets(ApiKeys()),
    )
    logger = logging.getLogger(REQUESTS)
    logger.addHandler(lines)
    logger.setLevel("INFO")
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": [(b"host", b"localhost")], "subprotocols": []}
    with pytest.raises(RuntimeError, match="broken"):
        await gate(scope, unused, unused)
    assert [(line.status, line.reason) for line in lines.all] == [(500, "internal")]


REPEATING = """
import contextvars, logging.config
from triton_omni_gateway.logs import log_config
from triton_omni_gateway.request_log import name_lines

def told(number):
    name_lines(f"req_{number}")
    logging.getLogger("uvicorn.error").warning("a library's warning")

logging.config.dictConfig(log_config("plain", "info"))
for number in range(100):
    contextvars.copy_context().run(told, number)
"""


def test_a_line_that_repeats_over_requests_is_written_once_and_names_the_first() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, FOLDERS))}
    command = [sys.executable, "-c", REPEATING]
    written = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    (line,) = written.stderr.splitlines()
    assert line.endswith("req_0: a library's warning")


UPGRADE = "HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
WHOLE = f"{UPGRADE}Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"


def test_a_socket_that_is_refused_has_an_id_and_a_line_and_is_no_fault_of_the_gateway() -> None:
    requests = {
        f"GET /v1/realtime?model=x {UPGRADE}": (400, "/v1/realtime"),
        f"GET /v1/realtime {UPGRADE}Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n": (400, "/v1/realtime"),
        f"POST /v1/realtime {WHOLE}": (405, "/v1/realtime"),
        f"GET /v2 {WHOLE}": (404, "/v2"),
    }
    with serve_grpc(FakeTriton()) as triton, started(triton) as process:
        assert process.stdout is not None
        base = process.stdout.readline().split("=")[1].split("/v1")[0]
        answers = [exchanged(base, f"{request}\r\n".encode()).decode() for request in requests]
        process.send_signal(signal.SIGTERM)
        written = process.communicate(timeout=TIMEOUT_S)[1]
    for answer, (status, path) in zip(answers, requests.values(), strict=True):
        head, _, body = answer.partition("\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status} ")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        (request_id,) = re.findall("(?i)x-request-id: (req_[0-9a-f]{24})", head)
        assert f"request={request_id} method=WebSocket path={path} status={status} reason=invalid_request" in written
    assert "ERROR" not in written


def connected(base: str) -> socket.socket:
    host, port = base.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)


def exchanged(base: str, request: bytes) -> bytes:
    """All that comes back until the gateway closes the connection."""
    with connected(base) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer
