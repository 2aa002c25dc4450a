# SPDX-License-Identifier: Apache-2.0
"""Overload is waited out, blocking, with `await` and over HTTP; nothing else is, and never once a reply has begun."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from client_fakes import (
    FakeHttp,
    FakeTriton,
    chunk,
    failure,
    greeting,
    http_answer,
    serve_grpc,
    serve_http,
)
from triton_omni_client import (
    NO_RETRY,
    AsyncOmniClient,
    BadRequest,
    HttpClient,
    Internal,
    OmniClient,
    Overloaded,
    Request,
    Retry,
    TextDelta,
)
from waiting import IN_TIME_S

FULL = "no free session [omni:overloaded;stage=thinker;retry_after_ms=40]"
QUICK = Retry(attempts=3, first_wait=0.0, longest_wait=0.0)
PATIENT = Retry(attempts=3, first_wait=30.0, longest_wait=30.0)
Ask = Callable[[str, Retry], str]


def ask(url: str, retry: Retry) -> str:
    with OmniClient(url, retry=retry) as client:
        return client.say("hi").text


def ask_async(url: str, retry: Retry) -> str:
    async def run() -> str:
        async with AsyncOmniClient(url, retry=retry) as client:
            return (await client.say("hi")).text

    return asyncio.run(run())


@pytest.fixture
def server() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton()) as fake:
        yield fake


def refusing(server: FakeTriton, times: int, text: str = FULL) -> None:
    """The server refuses so many requests, then answers."""

    def script(request: Any, context: Any) -> Iterator[Any]:
        if len(server.requests) <= times:
            yield failure(text)
        else:
            yield from greeting(request, context)

    server.script = script


@pytest.mark.parametrize("call", [ask, ask_async])
def test_a_refused_request_is_sent_again_after_the_time_the_server_asked_for(server: FakeTriton, call: Ask) -> None:
    refusing(server, 2)
    started = time.monotonic()
    assert call(server.url, QUICK) == "Hello, sea."
    assert time.monotonic() - started >= 2 * 0.04
    first, *others = server.requests
    assert len(others) == 2
    assert all(other == first for other in others)


@pytest.mark.parametrize("call", [ask, ask_async])
def test_patience_ends_with_the_attempts_and_the_server_s_own_error(server: FakeTriton, call: Ask) -> None:
    refusing(server, 99)
    with pytest.raises(Overloaded, match="no free session") as caught:
        call(server.url, QUICK)
    assert caught.value.retry_after_ms == 40
    assert len(server.requests) == 3


@pytest.mark.parametrize("call", [ask, ask_async])
def test_without_retry_a_refusal_is_raised_at_once(server: FakeTriton, call: Ask) -> None:
    refusing(server, 1)
    with pytest.raises(Overloaded):
        call(server.url, NO_RETRY)
    assert len(server.requests) == 1


@pytest.mark.parametrize("call", [ask, ask_async])
def test_another_error_is_not_tried_again(server: FakeTriton, call: Ask) -> None:
    refusing(server, 1, "broken [omni:internal]")
    with pytest.raises(Internal):
        call(server.url, QUICK)
    assert len(server.requests) == 1


@pytest.mark.parametrize("call", [ask, ask_async])
def test_a_reply_that_has_begun_is_never_begun_anew(server: FakeTriton, call: Ask) -> None:
    server.script = lambda *_: iter([chunk(), failure(FULL)])  # a response without text is one as well
    with pytest.raises(Overloaded):
        call(server.url, QUICK)
    assert len(server.requests) == 1


@pytest.mark.parametrize("call", [ask, ask_async])
def test_no_wait_outlasts_the_request_s_timeout(server: FakeTriton, call: Ask) -> None:
    refusing(server, 1, "full [omni:overloaded;retry_after_ms=200000]")
    started = time.monotonic()
    with pytest.raises(Overloaded, match="full"):
        call(server.url, QUICK)  # the client's own timeout is 150 s
    assert time.monotonic() - started < 100


def test_closing_ends_a_wait(server: FakeTriton) -> None:
    refusing(server, 99, "full [omni:overloaded;retry_after_ms=100000]")
    with OmniClient(server.url, retry=PATIENT) as client:
        started = time.monotonic()
        stream = client.stream(Request(text="hi"))
        assert server.finished.wait(IN_TIME_S)
        timer = threading.Timer(0.2, stream.close)
        timer.start()
        assert list(stream) == []
        assert time.monotonic() - started < 100
        timer.join()
    assert len(server.requests) == 1


async def test_closing_ends_a_wait_of_a_task(server: FakeTriton) -> None:
    refusing(server, 99, "full [omni:overloaded;retry_after_ms=100000]")
    async with AsyncOmniClient(server.url, retry=PATIENT) as client:
        started = time.monotonic()
        stream = client.stream(Request(text="hi"))
        assert await asyncio.to_thread(server.finished.wait, IN_TIME_S)
        asyncio.get_running_loop().call_later(0.2, stream.close)
        assert [delta async for delta in stream] == []
        assert time.monotonic() - started < 100
    assert len(server.requests) == 1


def test_an_overloaded_answer_of_http_is_waited_out_as_well() -> None:
    error = b'{"error": "full [omni:overloaded;retry_after_ms=1]"}'
    answers = [(503, {}, error), (429, {}, error), http_answer(text="Hello.")]
    with serve_http(FakeHttp(lambda: answers.pop(0))) as fake:
        assert HttpClient(fake.url, retry=QUICK).say("hi").text == "Hello."
        assert len(fake.paths) == 3


def test_waits_grow_within_their_bound_and_are_spread() -> None:
    retry = Retry(attempts=50, first_wait=1.0, longest_wait=4.0)
    waits: list[list[float]] = []
    for _ in range(200):
        found: list[float] = []
        loop = retry.blocking(1e9, threading.Event()).copy(sleep=found.append, stop=lambda s: s.attempt_number > 4)
        with pytest.raises(Overloaded):
            loop(_refuse)
        waits.append(found)
    columns = np.array(waits)
    assert (columns.min(0) >= 0.5).all()  # the hint
    assert (columns.max(0) <= np.array([1, 2, 4, 4]) + 0.5).all()
    assert (columns.max(0) > np.array([1, 2, 4, 4]) * 0.7 + 0.5).all()


def _refuse() -> None:
    raise Overloaded("full", retry_after_ms=500)


@pytest.mark.parametrize("values", [{"attempts": 0}, {"first_wait": -1}, {"first_wait": 9, "longest_wait": 1}])
def test_impossible_patience_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        Retry(**values)


def test_a_stream_that_is_forgotten_is_cancelled(server: FakeTriton) -> None:
    server.script = server.endless
    with OmniClient(server.url) as client:
        stream = client.stream(Request(text="hi"))
        assert next(stream) == TextDelta("Hello")
        del stream
        assert server.cancelled.wait(IN_TIME_S)


async def test_a_stream_that_is_forgotten_by_a_task_is_cancelled(server: FakeTriton) -> None:
    server.script = server.endless
    async with AsyncOmniClient(server.url) as client:
        stream = client.stream(Request(text="hi"))
        assert await anext(stream) == TextDelta("Hello")
        del stream
        assert await asyncio.to_thread(server.cancelled.wait, IN_TIME_S)


def test_texts_and_waveforms_are_iterators_whose_end_cancels(server: FakeTriton) -> None:
    with OmniClient(server.url) as client:
        stream = client.stream(Request(text="hi"))
        assert list(stream.texts()) == ["Hello", ", sea."]
        assert len(stream.reply().audio) == 960
        stream = client.stream(Request(text="hi"))
        assert [float(samples[0]) for samples in stream.waveforms()] == [0.25, -0.5]
        assert stream.reply().text == "Hello, sea."
        server.script = server.endless
        texts = client.stream(Request(text="hi")).texts()
        assert next(texts) == "Hello"
        texts.close()
        assert server.cancelled.wait(IN_TIME_S)


async def test_texts_and_waveforms_of_a_task(server: FakeTriton) -> None:
    async with AsyncOmniClient(server.url) as client:
        assert [text async for text in client.stream(Request(text="hi")).texts()] == ["Hello", ", sea."]
        waveforms = client.stream(Request(text="hi")).waveforms()
        assert [float(samples[0]) async for samples in waveforms] == [0.25, -0.5]


@pytest.mark.parametrize("ask", [HttpClient.unary, lambda *asked: asyncio.run(HttpClient.unary_async(*asked))])
def test_the_progress_of_an_upload_is_told(ask: Callable[..., Any]) -> None:
    told: list[tuple[int, int]] = []
    with serve_http(FakeHttp(lambda: http_answer(text="Hello."))) as fake:
        request = Request.ask("x" * (1 << 20))
        ask(HttpClient(fake.url), request, lambda done, total: told.append((done, total)))
    assert len(told) == 5
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] > 1 << 20
