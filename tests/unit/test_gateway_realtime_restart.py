# SPDX-License-Identifier: Apache-2.0
"""A stage or a server that restarts during a response ends it, and says so; the session goes on with the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest

from client_fakes import FakeTriton, chunk, failure, serve_grpc
from gateway_fakes import NOT_NOW, RunningGateway, run_gateway
from realtime_client import MANUAL, Talk, greeting, talk

DIED = "the process of talker ended unexpectedly [omni:internal;stage=talker;retry_after_ms=2250]"
FAILED = "the engine of talker failed: RuntimeError [omni:internal;stage=talker;retry_after_ms=2250]"
DEAD = "in ensemble 'qwen2_5_omni', Stub process 'talker_0_0' is not healthy."
LOST = "The Triton server, or a stage of it, ended while the request was under way. Send the request again."
LOST_TALKER = "The stage talker of the Triton server ended while the request was under way. Send the request again."


async def failed(session: Talk) -> tuple[str, str]:
    """Code and message of the failure that ends a response, of which something came."""
    response = (await session.until("response.done")).response
    assert response.status == "failed"
    assert [item.status for item in response.output] == ["incomplete"]
    return response.status_details.error.code, response.status_details.error.message


async def assert_goes_on(session: Talk) -> None:
    """The next response of the session is whole."""
    assert (await session.asked("response.create", "response.done")).response.status == "completed"


@pytest.mark.parametrize("is_ready", [True, False])
@pytest.mark.parametrize("text", [DIED, FAILED, DEAD])
async def test_a_stage_that_restarts_fails_a_response_in_the_gateway_s_own_words(
    triton: FakeTriton,
    gateway: RunningGateway,
    caplog: pytest.LogCaptureFixture,
    text: str,
    is_ready: bool,
) -> None:
    triton.script = lambda *_: iter([chunk(text="Once"), failure(text)])
    async with talk(gateway.base, audio=MANUAL["audio"]) as session:
        await session.say("Tell me a story.")
        triton.is_ready = is_ready
        await session.send("response.create")
        assert await failed(session) == ("internal", LOST_TALKER if is_ready else NOT_NOW)
        assert text.removeprefix("in ensemble 'qwen2_5_omni', ").partition(" [")[0] in caplog.text
        triton.script, triton.is_ready = greeting, True
        await assert_goes_on(session)


async def test_a_connection_that_breaks_fails_a_response(triton: FakeTriton, gateway: RunningGateway) -> None:
    def breaking(_request: Any, context: Any) -> Iterator[Any]:
        yield chunk(text="Once")
        context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    triton.script = breaking
    async with talk(gateway.base, audio=MANUAL["audio"]) as session:
        await session.send("response.create")
        assert await failed(session) == ("connection_failed", LOST)
        triton.script = greeting
        await assert_goes_on(session)


async def test_a_server_that_restarts_where_it_was_fails_a_response_and_answers_the_next_one() -> None:
    first = FakeTriton()
    first.script = first.endless
    with ExitStack() as running, ExitStack() as before:
        before.enter_context(serve_grpc(first))
        gateway = running.enter_context(run_gateway(first.url))
        async with talk(gateway.base, audio=MANUAL["audio"]) as session:
            await session.send("response.create")
            await session.until("response.output_audio.delta")
            await asyncio.to_thread(before.close)
            assert await failed(session) == ("connection_failed", NOT_NOW)
            away = (await session.asked("response.create", "response.done")).response
            assert (away.status, away.status_details.error.message) == ("failed", NOT_NOW)
            with serve_grpc(FakeTriton(greeting), first.url):
                await asyncio.to_thread(gateway.wait_for_metric, "omni_gateway_servers_ready", 1)
                await assert_goes_on(session)
