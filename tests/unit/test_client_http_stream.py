# SPDX-License-Identifier: Apache-2.0
"""Streams over HTTP against a scripted server on the loopback."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from client_fakes import INFO, FakeHttp, event, serve_http
from triton_omni_client import (
    NO_RETRY,
    AudioDelta,
    BadRequest,
    ConnectionFailed,
    Conversation,
    HttpClient,
    Info,
    Internal,
    Media,
    OmniClientError,
    Overloaded,
    Request,
    Retry,
    TextDelta,
    Timeout,
)
from triton_omni_client.audio import pcm16_from_waveform, wav_header
from waiting import IN_TIME_S

HI = Request(text="hi")
GREETING = [event("Hello"), event(", sea.", [0.25, -0.5]), event(audio=[0.5]), event(info=INFO)]
FULL = b'{"error": "full [omni:overloaded;stage=thinker;retry_after_ms=1]"}'


def events(*pieces: bytes) -> Any:
    return lambda: (200, {}, iter(pieces))


@pytest.fixture
def server() -> Iterator[FakeHttp]:
    with serve_http(FakeHttp(events(*GREETING))) as fake:
        yield fake


@pytest.fixture
def client(server: FakeHttp) -> HttpClient:
    return HttpClient(server.url + "/", retry=NO_RETRY)


def endless(server: FakeHttp) -> Any:
    """Sends one event and then nothing that is anything, until the client goes away."""

    def pieces() -> Iterator[bytes]:
        yield event("Hello")
        for _ in range(round(IN_TIME_S / 0.01)):
            yield b"\n"
            if server.left.wait(0.01):
                return

    return lambda: (200, {}, pieces())


@pytest.fixture
def silent(server: FakeHttp) -> Iterator[None]:
    """The server sends one event and then nothing."""
    over = threading.Event()

    def pieces() -> Iterator[bytes]:
        yield event("Hello")
        over.wait(IN_TIME_S)

    server.answer = lambda: (200, {}, pieces())
    yield
    over.set()


def test_deltas_are_those_of_the_other_clients(server: FakeHttp, client: HttpClient) -> None:
    stream = client.stream(Request(text="hi", seed=4, request_id="r2", traceparent="00-1-2-01"))
    assert [type(delta) for delta in stream] == [TextDelta, TextDelta, AudioDelta, AudioDelta, Info]
    reply = stream.reply()
    assert reply.text == "Hello, sea."
    np.testing.assert_array_equal(reply.audio, np.array([0.25, -0.5, 0.5], np.float32))
    assert reply.info is not None
    assert reply.info.codes == 2
    assert server.paths == ["/v2/models/qwen2_5_omni/generate_stream"]
    assert server.head == {
        "text_input": "hi",
        "sampling_parameters": '{"seed": 4}',
        "id": "r2",
        "parameters": {"traceparent": "00-1-2-01"},
    }


def test_media_travel_as_data_uris(server: FakeHttp, client: HttpClient) -> None:
    client.stream(Request.ask("what?", [Media("image", b"\x89PNG\0\xff")])).collect()
    assert server.head["media"] == ["data:;base64,iVBORwD/"]
    assert json.loads(server.head["messages"])[0]["content"][0] == {"type": "image"}


@pytest.mark.parametrize(("audio_format", "header"), [("pcm16", b""), ("wav", wav_header(100))])
def test_encoded_audio_is_decoded_to_the_sample(
    server: FakeHttp, client: HttpClient, audio_format: Any, header: bytes
) -> None:
    samples = np.arange(-50, 50, dtype=np.float32) * 600 / np.float32(32767)
    data = header + pcm16_from_waveform(samples)
    server.answer = events(event(encoded=data[:77]), event(encoded=data[77:]), event(info=INFO))
    reply = client.stream(Request(text="hi", audio_format=audio_format)).collect()
    np.testing.assert_array_equal(reply.audio, samples)


def test_a_delta_is_there_before_the_next_is_sent(server: FakeHttp, client: HttpClient) -> None:
    taken = threading.Event()

    def pieces() -> Iterator[bytes]:
        yield event("Hello")
        assert taken.wait(IN_TIME_S)
        yield event(info=INFO)

    server.answer = lambda: (200, {}, pieces())
    stream = client.stream(HI)
    assert next(stream) == TextDelta("Hello")
    taken.set()
    assert isinstance(next(stream), Info)
    assert next(stream, None) is None


def test_a_conversation_is_held_over_http(server: FakeHttp, client: HttpClient) -> None:
    server.answer = lambda: (200, {}, iter(GREETING))
    chat = Conversation()
    chat.ask(client, "hi").collect()
    chat.ask(client, "more?").collect()
    said = [message["content"] for message in json.loads(server.head["messages"])]
    assert [part if isinstance(part, str) else part[0]["text"] for part in said] == ["hi", "Hello, sea.", "more?"]


def test_leaving_a_stream_closes_its_connection(server: FakeHttp, client: HttpClient) -> None:
    server.answer = endless(server)
    with client.stream(HI) as stream:
        assert next(stream) == TextDelta("Hello")
        assert not server.left.is_set()
    assert server.left.wait(IN_TIME_S)
    assert next(stream, None) is None


@pytest.mark.usefixtures("silent")
def test_closing_from_another_thread_ends_a_wait(client: HttpClient) -> None:
    stream = client.stream(HI)
    assert next(stream) == TextDelta("Hello")
    timer = threading.Timer(0.2, stream.close)
    timer.start()
    assert list(stream) == []
    timer.join()


def test_a_stream_that_is_forgotten_is_closed(server: FakeHttp, client: HttpClient) -> None:
    server.answer = endless(server)
    assert next(client.stream(HI)) == TextDelta("Hello")
    gc.collect()
    assert server.left.wait(IN_TIME_S)


@pytest.mark.parametrize("prefix", [b"", b"data: "])
def test_a_refusal_is_the_error_it_means(server: FakeHttp, client: HttpClient, prefix: bytes) -> None:
    server.answer = lambda: (400, {}, prefix + b'{"error": "seed: no [omni:bad_request;stage=thinker]"}')
    with pytest.raises(BadRequest, match=r"^seed: no$") as caught:
        client.stream(HI).collect()
    assert caught.value.stage == "thinker"


def test_an_error_in_the_stream_is_raised_after_the_deltas_before_it(server: FakeHttp, client: HttpClient) -> None:
    server.answer = events(event("so far"), b"data: " + FULL + b"\n\n")
    stream = client.stream(HI)
    assert next(stream) == TextDelta("so far")
    with pytest.raises(Overloaded) as caught:
        next(stream)
    assert (caught.value.stage, caught.value.retry_after_ms) == ("thinker", 1)
    assert stream.reply().text == "so far"


def test_a_server_without_room_is_asked_again(server: FakeHttp) -> None:
    answers: list[Any] = [(400, {}, FULL), (400, {}, FULL), (200, {}, iter(GREETING))]
    server.answer = lambda: answers.pop(0)
    patient = HttpClient(server.url, retry=Retry(first_wait=0.01, longest_wait=0.01))
    assert patient.stream(HI).collect().text == "Hello, sea."
    assert len(server.paths) == 3


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ([event("half")], ConnectionFailed),
        ([], ConnectionFailed),
        ([b"data: {\n\n"], Internal),
        ([b"data: [1]\n\n"], Internal),
        ([b'data: {"text_output": 5}\n\n'], Internal),
        ([b'data: {"audio_output": "loud"}\n\n'], Internal),
    ],
)
def test_an_answer_outside_of_the_protocol_is_an_error(
    server: FakeHttp, client: HttpClient, pieces: list[bytes], kind: type[OmniClientError]
) -> None:
    server.answer = events(*pieces)
    with pytest.raises(kind):
        client.stream(HI).collect()


def test_a_connection_that_breaks_behind_the_account_loses_nothing(server: FakeHttp, client: HttpClient) -> None:
    def pieces() -> Iterator[bytes]:
        yield from GREETING
        raise ConnectionError

    server.answer = lambda: (200, {}, pieces())
    assert client.stream(HI).collect().text == "Hello, sea."


def test_the_timeout_is_of_the_whole_reply(server: FakeHttp, client: HttpClient) -> None:
    server.answer = endless(server)
    begin = time.monotonic()
    with pytest.raises(Timeout, match="timeout had passed"):
        client.stream(Request(text="hi", timeout=0.3)).collect()
    assert time.monotonic() - begin >= 0.3
    assert server.left.wait(IN_TIME_S)


@pytest.mark.usefixtures("silent")
def test_the_timeout_passes_in_silence_as_well(client: HttpClient) -> None:
    with pytest.raises(Timeout, match="timeout had passed"):
        client.stream(Request(text="hi", timeout=0.3)).collect()


def test_a_server_that_is_not_there_is_told_at_once(client: HttpClient) -> None:
    with pytest.raises(ConnectionFailed, match=r"127\.0\.0\.1:1"):
        HttpClient("http://127.0.0.1:1").stream(HI)
    with pytest.raises(BadRequest, match="not valid Unicode"):
        client.stream(Request(text="\ud800"))


def test_the_progress_of_an_upload_is_told(client: HttpClient) -> None:
    told: list[tuple[int, int]] = []
    request = Request.ask("x" * (1 << 20))
    client.stream(request, lambda done, total: told.append((done, total))).collect()
    assert len(told) == 5
    assert told[-1][0] == told[-1][1] > 1 << 20
