# SPDX-License-Identifier: Apache-2.0
"""A broken or hostile server: it cannot fill the client's memory, keep it beyond its time, or write to the terminal."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import numpy as np
import pytest

from client_fakes import (
    INFO,
    FakeHttp,
    FakeTriton,
    chunk,
    event,
    failure,
    http_answer,
    serve_grpc,
    serve_http,
)
from triton_omni_client import (
    NO_RETRY,
    AsyncOmniClient,
    ConnectionFailed,
    HttpClient,
    Internal,
    OmniClient,
    Overloaded,
    Request,
    Retry,
    Timeout,
    http_call,
    outputs,
)
from triton_omni_client.audio import wav_header
from triton_omni_client.bench import triton_metrics
from triton_omni_client.errors import from_text
from triton_omni_client.parsing import parsed
from triton_omni_client.protocol import refusal
from waiting import IN_TIME_S

HI = Request(text="hi")
SMALL = 1 << 18
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
DEEP = "[" * 100_000
OUTPUT = '{"outputs": [{"name": "info", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": %s}}]}'


def ask(client: HttpClient) -> Any:
    return client.unary(HI)


def stream(client: HttpClient) -> Any:
    return client.stream(HI).collect()


def models(client: HttpClient) -> Any:
    return client.models(client._timeout)


each_way = pytest.mark.parametrize("way", [ask, stream, models])


@contextmanager
def saying(*pieces: bytes, pause: float = 0.0, times: int = 300) -> Iterator[str]:
    """A server that says all pieces, and the last one again so many times, or until the client leaves."""
    over = threading.Event()

    def serve(listener: socket.socket) -> None:
        while not over.is_set():
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.recv(1 << 16)
                for piece in itertools.chain(pieces, itertools.repeat(pieces[-1], times)):
                    connection.sendall(piece)
                    over.wait(pause)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        try:
            yield "http://127.0.0.1:{1}".format(*listener.getsockname())
        finally:
            over.set()
            socket.create_connection(listener.getsockname()).close()
            thread.join(IN_TIME_S)


@each_way
@pytest.mark.parametrize(
    ("head", "rest"),
    [
        (OK + b"\r\n", b"x" * 4096),
        (OK + b"Content-Length: 1000000000000000000\r\n\r\n", b"data: " + b"x" * 4096),
        (CHUNKED, b"1000\r\n" + b"x" * 4096 + b"\r\n"),
        (b"HTTP/1.1 500 no\r\n\r\n", b"x" * 4096),
    ],
)
def test_an_answer_without_an_end_is_given_up_at_its_limit(
    monkeypatch: pytest.MonkeyPatch, way: Callable[[HttpClient], Any], head: bytes, rest: bytes
) -> None:
    monkeypatch.setattr(http_call, "MAX_ANSWER_BYTES", SMALL)
    with saying(head, rest, times=1 << 14) as url, pytest.raises(Internal, match=f"more than {SMALL} bytes"):
        way(HttpClient(url, timeout=IN_TIME_S, retry=NO_RETRY))


@each_way
@pytest.mark.parametrize(
    ("head", "rest"),
    [
        (b"", b"H"),
        (OK, b"x"),
        (OK + b"\r\n", b"d"),
        (CHUNKED, b"1\r\nd\r\n"),
        (b"HTTP/1.1 500 no\r\n\r\n", b"x"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
)
def test_an_answer_that_drips_does_not_outlast_the_timeout(
    way: Callable[[HttpClient], Any], head: bytes, rest: bytes
) -> None:
    with saying(head, rest, pause=0.01, times=6_000) as url, pytest.raises(Timeout):
        way(HttpClient(url, timeout=0.1, retry=NO_RETRY))


@pytest.mark.parametrize("answer", [OK + b"Content-Length: 9\r\n\r\nhalf", CHUNKED + b"9\r\nhalf"])
def test_an_answer_that_is_cut_off_is_a_broken_connection(answer: bytes) -> None:
    with saying(answer, times=0) as url, pytest.raises(ConnectionFailed):
        HttpClient(url, timeout=IN_TIME_S).unary(HI)


def test_a_redirect_is_not_followed_and_packed_answers_are_not_unpacked() -> None:
    with serve_http(FakeHttp(lambda: http_answer(text="stolen"))) as other:
        for way in (ask, stream):
            redirect = (302, {"Location": f"{other.url}/v2"}, b"")
            with serve_http(FakeHttp(lambda answer=redirect: answer)) as fake, pytest.raises(Internal):
                way(HttpClient(fake.url, timeout=IN_TIME_S))
        assert other.paths == []
    packed = zlib.compress(bytes(1 << 20))
    with (
        serve_http(FakeHttp(lambda: (500, {"Content-Encoding": "deflate"}, packed))) as fake,
        pytest.raises(Internal, match="HTTP status 500"),
    ):
        HttpClient(fake.url, timeout=IN_TIME_S).unary(HI)


@pytest.mark.parametrize(
    "piece", [{"text": "x" * 4096}, {"audio": np.zeros(1024, np.float32)}, {"encoded": bytes(3072)}]
)
def test_a_reply_without_an_end_is_given_up_at_its_limit(monkeypatch: pytest.MonkeyPatch, piece: Any) -> None:
    monkeypatch.setattr(outputs, "MAX_REPLY_BYTES", SMALL)
    with (
        serve_grpc(FakeTriton(lambda *_: iter(chunk(**piece) for _ in range(10_000)))) as fake,
        OmniClient(fake.url) as client,
    ):
        with pytest.raises(Internal, match=f"more than {SMALL} bytes"):
            client.stream(Request(text="hi", audio_format="pcm16")).collect()
        assert fake.cancelled.wait(IN_TIME_S)


def test_a_wav_file_of_endless_header_is_refused() -> None:
    endless = wav_header(0)[:12] + (b"LIST" + bytes(4)) * 20_000
    with (
        serve_grpc(FakeTriton(lambda *_: iter([chunk(encoded=endless)]))) as fake,
        OmniClient(fake.url) as client,
        pytest.raises(Internal, match="no samples in its first"),
    ):
        client.stream(Request(text="hi", audio_format="wav")).collect()


def ask_async(url: str) -> Any:
    async def run() -> Any:
        async with AsyncOmniClient(url, timeout=IN_TIME_S) as client:
            return await client.say("hi")

    return asyncio.run(run())


def ask_blocking(url: str) -> Any:
    with OmniClient(url, timeout=IN_TIME_S) as client:
        return client.say("hi")


@pytest.mark.parametrize("way", [ask_blocking, ask_async])
@pytest.mark.parametrize("packing", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_a_packed_message_is_refused_before_it_is_unpacked(way: Callable[[str], Any], packing: Any) -> None:
    def packed(_request: Any, context: Any) -> Iterator[Any]:
        context.set_compression(packing)
        yield chunk(encoded=bytes(8 << 20))

    with serve_grpc(FakeTriton(packed)) as fake, pytest.raises(Internal):  # gRPC's words differ
        way(fake.url)


@pytest.mark.parametrize(
    "text",
    [
        "no " + " " * 20_000 + "room",
        "[omni:a;b=" * 2_000 + "] and",
        "Stub process '" + "_1" * 10_000,
        "failed to connect to all addresses; " + "x" * 20_000,
    ],
)
def test_an_error_text_is_read_in_bounded_work_and_keeps_its_end(text: str) -> None:
    for error in (from_text(text), refusal(text)):
        assert len(error.message) <= 4096
    kept = from_text(f"{text} [omni:overloaded;retry_after_ms=7]")
    assert (type(kept), kept.retry_after_ms) == (Overloaded, 7)


@pytest.mark.parametrize("digits", ["9" * 11, "9" * 400, "9" * 5000])
def test_a_retry_time_beyond_all_waits_is_none(digits: str) -> None:
    refusing = FakeTriton(lambda *_: iter([failure(f"full [omni:overloaded;retry_after_ms={digits}]")]))
    with (
        serve_grpc(refusing) as fake,
        OmniClient(fake.url, retry=Retry(2, 0.0, 0.0)) as client,
        pytest.raises(Overloaded) as caught,
    ):
        client.say("hi")
    assert caught.value.retry_after_ms is None


@pytest.mark.parametrize("text", [DEEP, "NaN", "[Infinity]", "9" * 5000, "{"])
def test_whatever_is_no_json_is_one_kind_of_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parsed(text)


@pytest.mark.parametrize(
    "line",
    [
        DEEP,
        '{"audio_output": [NaN]}',
        '{"audio_output": [1e39]}',
        f'{{"audio_output": [1{"0" * 400}]}}',
        f'{{"error": {DEEP}}}',
    ],
)
def test_an_event_of_absurd_values_is_outside_of_the_protocol(line: str) -> None:
    with (
        serve_http(FakeHttp(lambda: (200, {}, iter([b"data: " + line.encode() + b"\n\n"])))) as fake,
        pytest.raises(Internal),
    ):
        stream(HttpClient(fake.url, timeout=IN_TIME_S))


@pytest.mark.parametrize(
    "info",
    [{"time_to_first_text_ms": float("nan")}, {"seed": 1 << 70}, {"usage": {"codes": -(1 << 70)}}],
)
def test_an_account_of_absurd_numbers_is_refused(info: Any) -> None:
    with serve_http(FakeHttp(lambda: (200, {}, iter([event(info=INFO | info)])))) as fake, pytest.raises(Internal):
        stream(HttpClient(fake.url, timeout=IN_TIME_S))


@pytest.mark.parametrize("samples", [[float("nan")], [0.5, float("inf")], [-float("inf")]])
def test_samples_that_are_no_sound_are_refused(samples: list[float]) -> None:
    with (
        serve_grpc(FakeTriton(lambda *_: iter([chunk(audio=np.array(samples, np.float32))]))) as fake,
        OmniClient(fake.url) as client,
        pytest.raises(Internal, match="not finite"),
    ):
        client.say("hi")


@pytest.mark.parametrize(
    ("head", "length"),
    [
        (
            OUTPUT % "1e999",
            "",
        ),
        (
            OUTPUT % "-1",
            "",
        ),
        (DEEP, ""),
        ("{}", "9" * 5000),
        ("{}", "9" * 9),
    ],
)
def test_an_answer_that_lies_about_its_sizes_is_outside_of_the_protocol(head: str, length: str) -> None:
    headers = {"Inference-Header-Content-Length": length or str(len(head))}
    with serve_http(FakeHttp(lambda: (200, headers, head.encode()))) as fake, pytest.raises(Internal):
        HttpClient(fake.url, timeout=IN_TIME_S).unary(HI)


class AbsurdIndex(FakeHttp):
    """Tells of its models what it likes."""

    index: Any = ()
    config: Any = None

    def facts(self, path: str) -> bytes | None:
        return json.dumps(self.index if path.endswith("index") else self.config).encode()


@pytest.mark.parametrize(
    ("index", "config"),
    [
        ({"name": "a"}, {}),
        ([1], {}),
        ([{}], {}),
        ([{"name": "a"}] * 101, {}),
        ([{"name": "a"}], [1]),
        ([{"name": "a"}], {"ensemble_scheduling": {"step": [{}]}}),
        ([{"name": "a"}], {"input": [3]}),
    ],
)
def test_an_account_of_models_outside_of_the_protocol_is_an_error(index: Any, config: Any) -> None:
    fake = AbsurdIndex(lambda: (200, {}, b""))
    fake.index, fake.config = index, config
    with serve_http(fake), pytest.raises(Internal):
        HttpClient(fake.url, timeout=IN_TIME_S).models()
    assert len(fake.paths) < 101


def test_the_metrics_of_a_server_are_read_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_metrics, "MAX_PAGE_BYTES", SMALL)
    with saying(OK + b"\r\n", b"x" * 4096, times=1 << 14) as url, pytest.raises(ValueError, match="more than"):
        triton_metrics.fetch(url)
