# SPDX-License-Identifier: Apache-2.0
"""The asyncio client against a scripted Triton over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import pytest
import pytest_asyncio

from client_fakes import (
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
    AsyncOmniClient,
    AudioDelta,
    BadRequest,
    Cancelled,
    ConnectionFailed,
    Info,
    Internal,
    Overloaded,
    Request,
    TextDelta,
    Timeout,
)
from waiting import IN_TIME_S


@pytest.fixture
def server() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton()) as fake:
        yield fake


@pytest_asyncio.fixture
async def client(server: FakeTriton) -> AsyncIterator[AsyncOmniClient]:
    async with AsyncOmniClient(server.url) as connected:
        yield connected


async def _seen(server: FakeTriton) -> bool:
    return await asyncio.to_thread(server.cancelled.wait, IN_TIME_S)


async def test_deltas_come_in_the_server_s_order(client: AsyncOmniClient) -> None:
    kinds = [type(delta) async for delta in client.stream(Request(text="hi"))]
    assert kinds == [TextDelta, TextDelta, AudioDelta, AudioDelta, Info]


async def test_say_collects_text_audio_info_and_times(client: AsyncOmniClient) -> None:
    reply = await client.say("hi", seed=1)
    assert reply.text == "Hello, sea."
    np.testing.assert_array_equal(reply.audio, np.repeat(floats([0.25, -0.5]), 480))
    assert reply.info is not None
    assert reply.info.seed == 7
    assert reply.timings.first_text is not None
    assert reply.timings.first_text <= reply.timings.total


async def test_an_error_in_the_stream_is_raised_after_the_deltas_before_it(
    server: FakeTriton, client: AsyncOmniClient
) -> None:
    text = "full [omni:overloaded;stage=talker;retry_after_ms=50]"
    server.script = lambda *_: iter([chunk(text="so far"), failure(text)])
    stream = client.stream(Request(text="hi"))
    assert await anext(stream) == TextDelta("so far")
    with pytest.raises(Overloaded) as caught:
        await anext(stream)
    assert (caught.value.stage, caught.value.retry_after_ms) == ("talker", 50)
    assert await anext(stream, None) is None
    assert stream.reply().text == "so far"
    assert stream.timings().first_text is not None


async def test_a_refused_stream_is_left_at_its_end_and_not_before(
    server: FakeTriton, client: AsyncOmniClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton_omni_client.settling.SETTLED_WITHIN_S", IN_TIME_S)

    def script(_request: Any, _context: Any) -> Iterator[Any]:
        yield failure("no [omni:bad_request]")
        server.cancelled.wait(0.2)

    server.script = script
    with pytest.raises(BadRequest):
        await client.say("hi")
    assert await asyncio.to_thread(server.finished.wait, IN_TIME_S)
    assert not server.cancelled.is_set()


async def test_an_error_ends_a_stream_that_the_server_leaves_open(server: FakeTriton, client: AsyncOmniClient) -> None:
    def script(_request: Any, _context: Any) -> Iterator[Any]:
        yield failure("broken [omni:internal]")
        server.cancelled.wait(IN_TIME_S)

    server.script = script
    with pytest.raises(Internal):
        await client.say("hi")
    assert await _seen(server)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, BadRequest),
        (grpc.StatusCode.CANCELLED, Cancelled),  # and not asyncio's, which would end the caller's task
        (grpc.StatusCode.UNAVAILABLE, ConnectionFailed),
    ],
)
async def test_a_status_of_grpc_is_an_error_of_the_client(
    server: FakeTriton, client: AsyncOmniClient, status: grpc.StatusCode, kind: type[Exception]
) -> None:
    server.script = lambda _request, context: context.abort(status, "because")
    with pytest.raises(kind, match="because"):
        await client.say("hi")


async def test_a_stream_that_ends_without_its_final_response_is_an_error(
    server: FakeTriton, client: AsyncOmniClient
) -> None:
    server.script = lambda *_: iter([chunk(text="half")])
    with pytest.raises(ConnectionFailed, match="before the reply was complete"):
        await client.say("hi")


async def test_a_broken_call_after_the_final_response_loses_nothing(
    server: FakeTriton, client: AsyncOmniClient
) -> None:
    def script(request: Any, context: Any) -> Iterator[Any]:
        yield from greeting(request, context)
        context.abort(grpc.StatusCode.UNAVAILABLE, "going down")

    server.script = script
    assert (await client.say("hi")).text == "Hello, sea."


async def test_leaving_a_stream_cancels_on_the_server(server: FakeTriton, client: AsyncOmniClient) -> None:
    server.script = server.endless
    async with client.stream(Request(text="hi")) as stream:
        assert await anext(stream) == TextDelta("Hello")
        assert not server.cancelled.is_set()
    assert await _seen(server)


async def test_closing_while_another_task_waits_stops_its_iteration(
    server: FakeTriton, client: AsyncOmniClient
) -> None:
    server.script = server.endless
    stream, read = client.stream(Request(text="hi")), []

    async def reader() -> None:
        async for delta in stream:
            read.append(type(delta))

    waiting = asyncio.create_task(reader())
    async with asyncio.timeout(IN_TIME_S):
        while len(read) < 2:
            await asyncio.sleep(0.01)
        stream.close()
        await waiting
    assert read == [TextDelta, AudioDelta]
    assert await _seen(server)


async def test_cancelling_the_task_cancels_on_the_server(server: FakeTriton, client: AsyncOmniClient) -> None:
    server.script = server.endless
    task = asyncio.create_task(client.say("hi"))
    while not server.requests:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await _seen(server)


async def test_a_timeout_longer_than_any_clock_is_waited_for(client: AsyncOmniClient) -> None:
    assert (await client.say("hi", timeout=1e300)).text == "Hello, sea."


async def test_asyncio_s_own_timeout_works_around_a_stream(server: FakeTriton, client: AsyncOmniClient) -> None:
    loop = asyncio.get_running_loop()

    def script(request: Any, context: Any) -> Iterator[Any]:
        loop.call_soon_threadsafe(limit.reschedule, loop.time())
        yield from server.endless(request, context)

    server.script = script
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as limit:
            await client.say("hi")
    assert await _seen(server)


async def test_the_request_s_timeout_is_sent_and_kept_here(server: FakeTriton, client: AsyncOmniClient) -> None:
    server.script = server.endless
    for timeout in TIMEOUTS:
        with pytest.raises(Timeout):
            await client.say("hi", timeout=timeout)
        if server.requests:
            break
    assert parameters_of(server.requests[-1]) == {"timeout": timeout}


async def test_a_finished_stream_is_not_cancelled(
    server: FakeTriton, client: AsyncOmniClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton_omni_client.settling.LATE_END_S", IN_TIME_S)
    await client.say("hi")
    assert await asyncio.to_thread(server.finished.wait, IN_TIME_S)
    assert not server.cancelled.is_set()


async def test_many_streams_run_at_once_on_one_client(server: FakeTriton, client: AsyncOmniClient) -> None:
    together = threading.Barrier(16)

    def script(request: Any, _context: Any) -> Iterator[Any]:
        text = inputs_of(request)["text_input"][0].decode()
        yield chunk(text=text)
        together.wait(IN_TIME_S)
        yield chunk(text="!", audio=np.full(int(text), 0.5, np.float32))
        yield final()

    server.script = script
    replies = await asyncio.gather(*(client.say(str(n)) for n in range(1, 17)))
    assert [reply.text for reply in replies] == [f"{n}!" for n in range(1, 17)]
    assert [len(reply.audio) for reply in replies] == list(range(1, 17))


async def test_ready_asks_server_and_model(server: FakeTriton, client: AsyncOmniClient) -> None:
    assert await client.ready(IN_TIME_S)
    server.is_ready = False
    assert not await client.ready()
    assert not await client.wait_ready(0.3)
    async with AsyncOmniClient("127.0.0.1:1") as nobody:
        assert not await nobody.ready()


async def test_wait_ready_sees_a_server_that_becomes_ready(server: FakeTriton, client: AsyncOmniClient) -> None:
    server.is_ready = False
    asyncio.get_running_loop().call_later(0.3, setattr, server, "is_ready", True)
    assert await client.wait_ready(IN_TIME_S)


async def test_a_secure_channel_is_used_when_credentials_are_given(server: FakeTriton) -> None:
    async with AsyncOmniClient(server.url, credentials=grpc.ssl_channel_credentials()) as secure:
        with contextlib.suppress(ConnectionFailed):
            await secure.say("hi")
            pytest.fail("plain text was taken for TLS")
    assert server.requests == []


async def test_a_whole_reply_without_an_end_is_waited_for_no_longer(
    server: FakeTriton, client: AsyncOmniClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton_omni_client.settling.LATE_END_S", 0.2)
    server.script = server.unending
    begin = time.monotonic()
    reply = await client.say("hi")
    assert time.monotonic() - begin >= 0.2
    assert (reply.text, reply.info is None) == ("Hello", False)
    assert await _seen(server)
