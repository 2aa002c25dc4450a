# SPDX-License-Identifier: Apache-2.0
"""Whole replies over HTTP against a scripted server on the loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from client_fakes import INFO, FakeHttp, http_answer, serve_http
from triton_omni_client import (
    BadRequest,
    ConnectionFailed,
    HttpClient,
    Internal,
    Media,
    OmniClientError,
    Overloaded,
    Request,
    Timeout,
    TooLarge,
)
from triton_omni_client.audio import pcm16_from_waveform, wav_header
from waiting import IN_TIME_S

SAMPLES = np.arange(-50, 50, dtype=np.float32) * 600 / np.float32(32767)


@pytest.fixture
def server() -> Iterator[FakeHttp]:
    fake = FakeHttp(lambda: http_answer(text="Hello, sea.", audio=SAMPLES, info=INFO))
    with serve_http(fake):
        yield fake


@pytest.fixture
def client(server: FakeHttp) -> HttpClient:
    return HttpClient(server.url + "/")


def test_a_reply_comes_in_one_answer(server: FakeHttp, client: HttpClient) -> None:
    reply = client.unary(Request(text="hi", request_id="r2", traceparent="00-1-2-01"))
    assert reply.text == "Hello, sea."
    np.testing.assert_array_equal(reply.audio, SAMPLES)
    assert reply.info is not None
    assert reply.info.codes == 2
    assert server.paths == ["/v2/models/qwen2_5_omni_unary/infer"]
    assert server.head["id"] == "r2"
    assert server.head["parameters"] == {"traceparent": "00-1-2-01"}
    assert {out["name"] for out in server.head["outputs"]} == {"text_output", "audio_output", "audio_base64", "info"}


def test_media_travel_as_raw_bytes(server: FakeHttp, client: HttpClient) -> None:
    client.say("what?", [Media("image", b"\x89PNG\0\xff")], seed=4)
    assert server.inputs["media"] == [b"\x89PNG\0\xff"]
    assert json.loads(server.inputs["sampling_parameters"][0]) == {"seed": 4}
    assert set(server.inputs) == {"messages", "media", "sampling_parameters"}


@pytest.mark.parametrize(("audio_format", "header"), [("pcm16", b""), ("wav", wav_header(len(SAMPLES)))])
def test_encoded_audio_is_decoded_to_the_sample(
    server: FakeHttp, client: HttpClient, audio_format: Any, header: bytes
) -> None:
    server.answer = lambda: http_answer(encoded=header + pcm16_from_waveform(SAMPLES))
    np.testing.assert_array_equal(client.say("hi", audio_format=audio_format).audio, SAMPLES)


async def test_a_loop_is_not_blocked(client: HttpClient) -> None:
    assert (await client.unary_async(Request(text="hi"))).text == "Hello, sea."


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (400, b'{"error": "full [omni:overloaded;stage=thinker;retry_after_ms=7]"}', Overloaded, "^full$"),
        (500, b'{"error": "seed: no [omni:bad_request]"}', BadRequest, "^seed: no$"),
        (400, b'{"error": "unexpected input"}', BadRequest, "^unexpected input$"),
        (413, b"<html>", TooLarge, "HTTP status 413"),
        (429, b"", Overloaded, "HTTP status 429"),
        (503, b"{}", ConnectionFailed, "HTTP status 503"),
        (504, b"[]", Timeout, "HTTP status 504"),
        (500, b"?", Internal, "HTTP status 500"),
    ],
)
def test_an_error_answer_is_the_error_it_means(
    server: FakeHttp, client: HttpClient, *, status: int, body: bytes, kind: type[OmniClientError], message: str
) -> None:
    server.answer = lambda: (status, {}, body)
    with pytest.raises(kind, match=message):
        client.say("hi")


def _answer(head: Any, data: bytes = b"", length: str | None = None) -> tuple[int, dict[str, str], bytes]:
    text = json.dumps(head).encode()
    return 200, {"Inference-Header-Content-Length": length or str(len(text))}, text + data


@pytest.mark.parametrize(
    "answer",
    [
        (200, {}, b"<html>welcome</html>"),
        _answer({}, length="none"),
        _answer({"outputs": None}),
        _answer({"outputs": [{"name": "info"}]}),
        _answer({"outputs": []}, b"more"),
        _answer({"outputs": []}, length="3"),
    ],
)
def test_an_answer_outside_of_the_protocol_is_an_internal_error(
    server: FakeHttp, client: HttpClient, answer: tuple[int, dict[str, str], bytes]
) -> None:
    server.answer = lambda: answer
    with pytest.raises(Internal):
        client.say("hi")


def test_the_timeout_of_the_request_counts(server: FakeHttp, client: HttpClient) -> None:
    over = threading.Event()

    def slow() -> tuple[int, dict[str, str], bytes]:
        over.wait(IN_TIME_S)
        return 500, {}, b""

    server.answer = slow
    with pytest.raises(Timeout, match=r"0\.2 s"):
        client.say("hi", timeout=0.2)
    over.set()


def test_a_timeout_longer_than_any_clock_is_waited_for(client: HttpClient) -> None:
    assert client.say("hi", timeout=1e300).text == "Hello, sea."


def test_an_unreachable_server_is_a_connection_error() -> None:
    with pytest.raises(ConnectionFailed, match=r"127\.0\.0\.1:1"):
        HttpClient("http://127.0.0.1:1").say("hi")
    with pytest.raises(ConnectionFailed):
        HttpClient("https://127.0.0.1:1").say("hi")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:port", "http://x:0"])
def test_a_url_that_is_not_http_is_refused(url: str) -> None:
    with pytest.raises(BadRequest, match="no HTTP URL"):
        HttpClient(url)


def test_ready_asks_server_and_model(server: FakeHttp, client: HttpClient) -> None:
    assert client.ready(IN_TIME_S)
    assert server.paths == ["/v2/health/ready", "/v2/models/qwen2_5_omni_unary/ready"]
    server.is_ready = False
    assert not client.wait_ready(0)
    assert not HttpClient("http://127.0.0.1:1").ready()
