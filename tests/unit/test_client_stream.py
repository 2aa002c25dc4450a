# SPDX-License-Identifier: Apache-2.0
"""The blocking client against a scripted Triton over real gRPC."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import pytest

from client_fakes import (
    INFO,
    TIMEOUTS,
    FakeTriton,
    chunk,
    failure,
    final,
    floats,
    greeting,
    inputs_of,
    parameters_of,
    serve_grpc,
)
from triton_omni_client import (
    AudioDelta,
    BadRequest,
    Cancelled,
    ConnectionFailed,
    Info,
    Internal,
    Media,
    OmniClient,
    OmniClientError,
    Overloaded,
    Request,
    TextDelta,
    Timeout,
    TooLarge,
)
from waiting import IN_TIME_S

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def server() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton()) as fake:
        yield fake


@pytest.fixture
def client(server: FakeTriton) -> Iterator[OmniClient]:
    with OmniClient(server.url) as connected:
        yield connected


def test_deltas_come_in_the_server_s_order(client: OmniClient) -> None:
    kinds = [type(delta) for delta in client.stream(Request(text="hi"))]
    assert kinds == [TextDelta, TextDelta, AudioDelta, AudioDelta, Info]


def test_a_delta_is_given_before_the_next_one_is_made(server: FakeTriton, client: OmniClient) -> None:
    taken = threading.Event()

    def script(_request: Any, _context: Any) -> Iterator[Any]:
        yield chunk(text="first")
        assert taken.wait(IN_TIME_S)
        yield chunk(text="second")
        yield final()

    server.script = script
    stream = client.stream(Request(text="hi"))
    assert next(stream) == TextDelta("first")
    taken.set()
    assert next(stream) == TextDelta("second")
    assert next(stream, None) is None


def test_say_collects_text_audio_info_and_times(client: OmniClient) -> None:
    reply = client.say("hi")
    assert reply.text == "Hello, sea."
    assert reply.audio.dtype == np.float32
    np.testing.assert_array_equal(reply.audio, np.repeat(floats([0.25, -0.5]), 480))
    assert reply.info is not None
    assert (reply.info.codes, reply.info.seed, reply.info.raw) == (2, 7, INFO)
    times = reply.timings
    assert times.first_text is not None
    assert times.first_audio is not None
    assert 0 < times.first_text <= times.first_audio <= times.total
    assert times.audio == pytest.approx(960 / 24_000)
    assert times.real_time_factor == pytest.approx(times.total / times.audio)


def test_the_request_arrives_as_the_contract_says(server: FakeTriton, client: OmniClient) -> None:
    client.say(
        "what?",
        [Media("image", b"\x89PNG\0"), Media("audio", b"")],
        voice="Ethan",
        seed=0,
        request_id="r1",
        traceparent=TRACEPARENT,
    )
    (request,) = server.requests
    assert (request.model_name, request.id) == ("qwen2_5_omni", "r1")
    assert request.parameters["triton_enable_empty_final_response"].bool_param
    assert request.parameters["traceparent"].string_param == TRACEPARENT
    assert set(inputs_of(request)) == {"messages", "media", "sampling_parameters"}
    assert inputs_of(request)["media"] == [b"\x89PNG\0", b""]
    assert parameters_of(request) == {"voice": "Ethan", "seed": 0}


@pytest.mark.parametrize(
    ("text", "kind", "stage", "retry"),
    [
        ("no session [omni:overloaded;stage=thinker;retry_after_ms=250]", Overloaded, "thinker", 250),
        ("seed: bad [omni:bad_request]", BadRequest, None, None),
        ("image: big [omni:too_large;stage=thinker]", TooLarge, "thinker", None),
        ("gave up [omni:timeout;stage=talker]", Timeout, "talker", None),
        ("stopped [omni:cancelled]", Cancelled, None, None),
        ("in ensemble 'x', Failed to process", Internal, None, None),
    ],
)
def test_an_error_in_the_stream_is_raised_after_the_deltas_before_it(
    server: FakeTriton,
    client: OmniClient,
    *,
    text: str,
    kind: type[OmniClientError],
    stage: str | None,
    retry: int | None,
) -> None:
    server.script = lambda *_: iter([chunk(text="so far"), failure(text)])
    stream = client.stream(Request(text="hi"))
    assert next(stream) == TextDelta("so far")
    with pytest.raises(kind) as caught:
        next(stream)
    assert type(caught.value) is kind
    assert (caught.value.stage, caught.value.retry_after_ms) == (stage, retry)
    assert "[omni" not in str(caught.value)
    assert next(stream, None) is None
    assert stream.reply().text == "so far"


def test_a_refused_stream_is_left_at_its_end_and_not_before(
    server: FakeTriton, client: OmniClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton_omni_client.settling.SETTLED_WITHIN_S", IN_TIME_S)

    def script(_request: Any, _context: Any) -> Iterator[Any]:
        yield failure("no [omni:bad_request]")
        server.cancelled.wait(0.2)

    server.script = script
    with pytest.raises(BadRequest):
        client.say("hi")
    assert server.finished.wait(IN_TIME_S)
    assert not server.cancelled.is_set()


def test_an_error_ends_a_stream_that_the_server_leaves_open(server: FakeTriton, client: OmniClient) -> None:
    def script(_request: Any, _context: Any) -> Iterator[Any]:
        yield failure("broken [omni:internal]")
        server.cancelled.wait(IN_TIME_S)

    server.script = script
    with pytest.raises(Internal):
        client.say("hi")
    assert server.cancelled.wait(IN_TIME_S)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, BadRequest),
        (grpc.StatusCode.NOT_FOUND, BadRequest),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, TooLarge),
        (grpc.StatusCode.CANCELLED, Cancelled),
        (grpc.StatusCode.UNAVAILABLE, ConnectionFailed),
        (grpc.StatusCode.UNKNOWN, Internal),
    ],
)
def test_a_status_of_grpc_is_an_error_of_the_client(
    server: FakeTriton, client: OmniClient, status: grpc.StatusCode, kind: type[Exception]
) -> None:
    server.script = lambda _request, context: context.abort(status, "because")
    with pytest.raises(kind, match="because"):
        client.say("hi")


def test_a_status_with_the_machine_readable_part_is_what_the_part_says(server: FakeTriton, client: OmniClient) -> None:
    text = "full [omni:overloaded;retry_after_ms=9]"
    server.script = lambda _request, context: context.abort(grpc.StatusCode.INTERNAL, text)
    with pytest.raises(Overloaded, match=r"^full$"):
        client.say("hi")


def test_a_stream_that_ends_without_its_final_response_is_an_error(server: FakeTriton, client: OmniClient) -> None:
    server.script = lambda *_: iter([chunk(text="half")])
    with pytest.raises(ConnectionFailed, match="before the reply was complete"):
        client.say("hi")


def test_an_output_without_its_data_is_an_error(server: FakeTriton, client: OmniClient) -> None:
    response = chunk(text="half")
    del response.infer_response.raw_output_contents[1:]
    server.script = lambda *_: iter([response, final()])
    with pytest.raises(Internal, match="4 outputs, 1 of them with data"):
        client.say("hi")


def test_times_and_reply_of_a_stream_can_be_asked_for_while_it_runs(client: OmniClient) -> None:
    stream = client.stream(Request(text="hi"))
    assert stream.timings().first_text is None
    next(stream)
    first = stream.timings()
    assert first.first_text is not None
    assert first.first_audio is None
    assert stream.reply().text == "Hello"
    stream.close()
    assert stream.timings().total == stream.timings().total  # the clock stands


def test_a_broken_call_after_the_final_response_loses_nothing(server: FakeTriton, client: OmniClient) -> None:
    def script(request: Any, context: Any) -> Iterator[Any]:
        yield from greeting(request, context)
        context.abort(grpc.StatusCode.UNAVAILABLE, "going down")

    server.script = script
    assert client.say("hi").text == "Hello, sea."


def test_closing_a_stream_cancels_on_the_server(server: FakeTriton, client: OmniClient) -> None:
    server.script = server.endless
    with client.stream(Request(text="hi")) as stream:
        assert next(stream) == TextDelta("Hello")
        assert not server.cancelled.is_set()
    assert server.cancelled.wait(IN_TIME_S)
    assert [type(delta) for delta in stream] == [AudioDelta]  # it had arrived with the text


def test_closing_from_another_thread_stops_a_waiting_iteration(server: FakeTriton, client: OmniClient) -> None:
    server.script = server.endless
    stream = client.stream(Request(text="hi"))
    assert [type(next(stream)) for _ in range(2)] == [TextDelta, AudioDelta]
    timer = threading.Timer(0.2, stream.close)
    timer.start()
    assert list(stream) == []
    assert server.cancelled.wait(IN_TIME_S)
    timer.join()


def test_a_finished_stream_is_not_cancelled(
    server: FakeTriton, client: OmniClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton_omni_client.settling.LATE_END_S", IN_TIME_S)
    with client.stream(Request(text="hi")) as stream:
        list(stream)
    assert server.finished.wait(IN_TIME_S)
    assert not server.cancelled.wait(0.1)


def test_the_request_s_timeout_is_sent_and_kept_here(server: FakeTriton, client: OmniClient) -> None:
    server.script = server.endless
    for timeout in TIMEOUTS:
        started = time.monotonic()
        with pytest.raises(Timeout):
            client.say("hi", timeout=timeout)
        assert time.monotonic() - started > 0.9 * timeout
        if server.requests:
            break
    assert parameters_of(server.requests[-1]) == {"timeout": timeout}
    assert server.cancelled.wait(IN_TIME_S)


@pytest.mark.parametrize("timeout", [1e10, 1e300])
def test_a_timeout_longer_than_any_clock_is_waited_for(client: OmniClient, timeout: float) -> None:
    assert client.say("hi", timeout=timeout).text == "Hello, sea."


def test_the_client_s_own_timeout_bounds_a_request_without_one(server: FakeTriton) -> None:
    server.script = server.endless
    with OmniClient(server.url, timeout=0.3) as impatient, pytest.raises(Timeout):
        impatient.say("hi")


def test_many_streams_run_at_once_on_one_client(server: FakeTriton, client: OmniClient) -> None:
    together = threading.Barrier(16)

    def script(request: Any, _context: Any) -> Iterator[Any]:
        text = inputs_of(request)["text_input"][0].decode()
        yield chunk(text=text)
        together.wait(IN_TIME_S)  # passes only when all sixteen are being answered
        yield chunk(text="!", audio=np.full(int(text), 0.5, np.float32))
        yield final()

    server.script = script
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda n: client.say(str(n)), range(1, 17)))
    assert [reply.text for reply in replies] == [f"{n}!" for n in range(1, 17)]
    assert [len(reply.audio) for reply in replies] == list(range(1, 17))


def test_one_thread_may_take_two_streams_in_turn(client: OmniClient) -> None:
    first, second = client.stream(Request(text="a")), client.stream(Request(text="b"))
    texts = [(next(first), next(second)) for _ in range(2)]
    assert texts == [(TextDelta("Hello"),) * 2, (TextDelta(", sea."),) * 2]
    first.close()
    assert second.collect().text == "Hello, sea."


def test_a_message_above_four_mebibytes_passes_both_ways(server: FakeTriton, client: OmniClient) -> None:
    samples = np.linspace(-1, 1, 2 << 20, dtype=np.float32)
    server.script = lambda *_: iter([chunk(audio=samples), final()])
    reply = client.say("hi", [Media("video", bytes(6 << 20))])
    np.testing.assert_array_equal(reply.audio, samples)


def test_a_message_above_the_stated_limit_is_too_large(server: FakeTriton) -> None:
    with OmniClient(server.url, max_message_bytes=1000) as small, pytest.raises(TooLarge):
        small.say("x" * 2000)


def test_an_unreachable_server_is_a_connection_error() -> None:
    with OmniClient("127.0.0.1:1") as client, pytest.raises(ConnectionFailed):
        client.say("hi")


def _forward(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@contextmanager
def far_away(url: str, delay: float) -> Iterator[str]:
    """The address of a way to `url` on which the first bytes of a connection take `delay` seconds."""
    host, port = url.split(":")
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener.accept()[0] as near:
            time.sleep(delay)
            with socket.create_connection((host, int(port))) as far, ThreadPoolExecutor(2) as pool:
                pool.submit(_forward, near, far)
                pool.submit(_forward, far, near)

    with listener, ThreadPoolExecutor(1) as pool:
        pool.submit(serve)
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_server_may_take_its_time_to_accept_a_connection(server: FakeTriton) -> None:
    with far_away(server.url, 0.5) as url, OmniClient(url) as client:
        assert client.say("hi").text == "Hello, sea."


def test_ready_asks_server_and_model(server: FakeTriton, client: OmniClient) -> None:
    assert client.ready(IN_TIME_S)
    server.is_ready = False
    assert not client.ready()
    assert not OmniClient("127.0.0.1:1").ready()
    assert not OmniClient(server.url, model="other").ready()


def test_wait_ready_sees_a_server_that_becomes_ready(server: FakeTriton, client: OmniClient) -> None:
    server.is_ready = False
    timer = threading.Timer(0.3, lambda: setattr(server, "is_ready", True))
    timer.start()
    assert client.wait_ready(IN_TIME_S)
    timer.join()


def test_wait_ready_gives_up(client: OmniClient, server: FakeTriton) -> None:
    server.is_ready = False
    started = time.monotonic()
    assert not client.wait_ready(0.3)
    assert time.monotonic() - started >= 0.3


def test_a_secure_channel_is_used_when_credentials_are_given(server: FakeTriton) -> None:
    with OmniClient(server.url, credentials=grpc.ssl_channel_credentials()) as secure, pytest.raises(ConnectionFailed):
        secure.say("hi")


def test_a_whole_reply_without_an_end_is_waited_for_no_longer(
    server: FakeTriton, client: OmniClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton_omni_client.settling.LATE_END_S", 0.2)
    server.script = server.unending
    begin = time.monotonic()
    reply = client.say("hi")
    assert time.monotonic() - begin >= 0.2
    assert reply.text == "Hello"
    assert reply.info is not None
    assert server.cancelled.wait(IN_TIME_S)
