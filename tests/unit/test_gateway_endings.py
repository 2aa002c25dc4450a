# SPDX-License-Identifier: Apache-2.0
"""How answers end that are not whole: cut off by a limit, or by a server that starts, stops or loses a stage."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from client_fakes import INFO, FakeTriton, chunk, failure, final, serve_grpc
from gateway_fakes import MODEL, USER, RunningGateway
from triton_omni_client.audio import pcm16_from_waveform

SOUND = np.full(480, 0.25, np.float32)
SPEECH = "/v1/audio/speech"
ASKED = {"model": MODEL, "input": "The sea."}


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton()) as fake:
        yield fake


def ending(**reasons: str) -> Any:
    """A spoken reply whose stages ended so."""
    info = {**INFO, "finish_reason": reasons}
    return lambda *_: iter([chunk(text="Hello", audio=SOUND), chunk(info=info), final()])


@pytest.mark.parametrize(
    ("reasons", "told"),
    [
        ({"thinker": "stop", "talker": "stop"}, "stop"),
        ({"thinker": "length", "talker": "stop"}, "length"),
        ({"thinker": "stop", "talker": "length"}, "length"),
        ({"thinker": "length", "talker": "length"}, "length"),
    ],
)
def test_a_reply_that_a_limit_cut_off_says_so(
    triton: FakeTriton,
    gateway: RunningGateway,
    reasons: dict[str, str],
    told: str,
) -> None:
    triton.script = ending(**reasons)
    chat = {"model": MODEL, "messages": USER, "modalities": ["text", "audio"], "audio": {"format": "pcm16"}}
    answers = [gateway.post({**ASKED, "stream_format": "sse"}, SPEECH), gateway.post(ASKED, SPEECH)]
    answers += [gateway.post({**chat, "stream": stream}) for stream in (True, False)]

    done = json.loads(answers[0].text.split("\n\n")[-2].removeprefix("data: "))
    assert (done["type"], done["finish_reason"]) == ("speech.audio.done", told)
    assert answers[3].json()["choices"][0]["finish_reason"] == told


def raw(gateway: RunningGateway, version: str) -> bytes:
    """An answer as it is sent."""
    body = json.dumps({**ASKED, "response_format": "pcm"})
    head = f"POST {SPEECH} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with gateway.connect() as caller:
        caller.sendall(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
        return b"".join(iter(lambda: caller.recv(65_536), b""))


@pytest.mark.parametrize("told", ["stop", "length"])
def test_a_sound_is_followed_by_why_it_ended(triton: FakeTriton, gateway: RunningGateway, told: str) -> None:
    triton.script = ending(thinker="stop", talker=told)
    answer = raw(gateway, "1.1")
    assert b"\r\ntrailer: x-finish-reason\r\n" in answer.lower()
    assert answer.endswith(f"\r\n0\r\nx-finish-reason: {told}\r\n\r\n".encode())
    old = raw(gateway, "1.0")  # which has no trailers
    assert old.startswith(b"HTTP/1.1 200 ")
    assert old.endswith(pcm16_from_waveform(SOUND))
    assert gateway.post(ASKED, SPEECH).status_code == gateway.post(ASKED, SPEECH).status_code == 200


KINDS: dict[str, Callable[[RunningGateway], httpx.Response]] = {
    "chat": lambda gateway: gateway.post({"model": MODEL, "messages": USER}),
    "streamed chat": lambda gateway: gateway.post({"model": MODEL, "messages": USER, "stream": True}),
    "speech": lambda gateway: gateway.post({"model": MODEL, "input": "hi"}, SPEECH),
    "speech in events": lambda gateway: gateway.post({"model": MODEL, "input": "hi", "stream_format": "sse"}, SPEECH),
    "transcription": lambda gateway: gateway.transcribe(),
    "streamed transcription": lambda gateway: gateway.transcribe(stream="true"),
}
STARTS = "talker is being started again [omni:overloaded;stage=talker;retry_after_ms=2250]"
STOPS = "the server is shutting down [omni:overloaded;stage=thinker;retry_after_ms=2250]"
DIED = "the process of talker ended unexpectedly [omni:internal;stage=talker;retry_after_ms=2250]"
UNLOADED = "Request for unknown model: 'qwen2_5_omni' is not found"
DEAD = "in ensemble 'qwen2_5_omni', Stub process 'talker_0_0' is not healthy."
NO_ROOM = "Failed to increase the shared memory pool size for key 'triton_python_backend_shm_region_7'"


@pytest.mark.parametrize("ask", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    "case",
    [
        *((text, False, 503, "3") for text in (STARTS, STOPS, DIED)),
        *((text, False, 503, "1") for text in (UNLOADED, DEAD, NO_ROOM)),
        (STARTS, True, 429, "3"),
        (DIED, True, 503, "3"),
        (DEAD, True, 503, "1"),
        (NO_ROOM, True, 500, None),
    ],
)
def test_a_server_that_starts_or_stops_is_told_in_the_gateway_s_own_words(
    triton: FakeTriton,
    gateway: RunningGateway,
    ask: Callable[[RunningGateway], httpx.Response],
    case: tuple[str, bool, int, str | None],
) -> None:
    text, is_ready, status, retry = case
    triton.script = lambda *_: iter([failure(text)])
    triton.is_ready = is_ready
    answer = ask(gateway)
    error = answer.json()["error"]
    assert (answer.status_code, answer.headers.get("retry-after")) == (status, retry)
    assert error["type"] in ("server_error", "rate_limit_error")
    assert text not in error["message"]
    if not is_ready:
        assert error["message"].startswith("No triton-omni server takes requests now")
        assert gateway.http.get("/health/ready").status_code == 503
        assert gateway.http.get("/health/ready").headers["retry-after"]
