# SPDX-License-Identifier: Apache-2.0
"""A gateway before several Triton servers: who gets a request, and who gets one that the first does not take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc
import openai
import pytest

from client_fakes import FakeTriton, Response, chunk, failure, final, serve_grpc
from gateway_fakes import TIMEOUT_S, RunningGateway, run_gateway
from triton_omni_gateway.pool import HOME_LEAD

READY = "omni_gateway_servers_ready"
MOVED = "omni_gateway_moved_requests_total"
OVERLOADED = "all 8 sessions are in use [omni:overloaded;stage=thinker;retry_after_ms=250]"


def failing(text: str) -> Callable[[Any, grpc.ServicerContext], Iterator[Response]]:
    def script(_request: Any, _context: grpc.ServicerContext) -> Iterator[Response]:
        yield failure(text)

    return script


def breaking(_request: Any, context: grpc.ServicerContext) -> Iterator[Response]:
    """The connection breaks before a response."""
    context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
    yield final()


def breaking_midway(_request: Any, context: grpc.ServicerContext) -> Iterator[Response]:
    yield chunk(text="Hel")
    context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


@pytest.fixture
def tritons() -> Iterator[list[FakeTriton]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serve_grpc(FakeTriton())) for _ in range(3)]


@pytest.fixture
def gateway(tritons: list[FakeTriton]) -> Iterator[RunningGateway]:
    with run_gateway(*[fake.url for fake in tritons]) as running:
        running.wait_for_metric(READY, 3)
        yield running


def asked(tritons: list[FakeTriton]) -> list[int]:
    return [len(fake.requests) for fake in tritons]


def test_requests_one_after_another_take_turns(tritons: list[FakeTriton], gateway: RunningGateway) -> None:
    for _ in range(6):
        assert gateway.chat().choices[0].message.content == "Hello, sea."
    assert asked(tritons) == [2, 2, 2]
    assert gateway.metric(MOVED) == 0


def test_the_server_with_the_fewest_replies_is_next(tritons: list[FakeTriton], gateway: RunningGateway) -> None:
    for fake in tritons[:2]:
        fake.script = fake.endless
    held = [gateway.chat(stream=True) for _ in range(3)]
    for stream in held[:2]:
        next(iter(stream))
    assert list(held[2]), "this one has ended"
    for _ in range(4):
        gateway.chat()
    assert asked(tritons) == [1, 1, 5]
    held[0].close()
    assert tritons[0].cancelled.wait(TIMEOUT_S)
    tritons[0].script = tritons[2].script
    deadline = time.monotonic() + TIMEOUT_S
    while asked(tritons)[0] == 1:  # its place is free as soon as the gateway knows that the caller is gone
        assert time.monotonic() < deadline
        gateway.chat()
    held[1].close()


def homes(tritons: list[FakeTriton], gateway: RunningGateway, keys: list[str]) -> dict[str, int]:
    """Where a request of each key goes."""
    found = {}
    for key in keys:
        before = asked(tritons)
        gateway.chat(prompt_cache_key=key)
        (found[key],) = [place for place, count in enumerate(asked(tritons)) if count > before[place]]
    return found


def test_turns_of_one_conversation_go_to_one_server(tritons: list[FakeTriton], gateway: RunningGateway) -> None:
    keys = [f"talk {number}" for number in range(40)]
    first = homes(tritons, gateway, keys)
    assert set(first.values()) == {0, 1, 2}
    assert homes(tritons, gateway, keys) == first
    away = first[keys[0]]
    tritons[away].is_ready = False
    gateway.wait_for_metric(READY, 2)
    moved = homes(tritons, gateway, keys)
    assert away not in moved.values()
    assert all(moved[key] == first[key] for key in keys if first[key] != away), "the others stay"
    tritons[away].is_ready = True
    gateway.wait_for_metric(READY, 3)
    assert homes(tritons, gateway, keys) == first


def test_a_home_with_many_more_replies_than_others_is_left(tritons: list[FakeTriton], gateway: RunningGateway) -> None:
    (home,) = homes(tritons, gateway, ["talk"]).values()
    tritons[home].script = tritons[home].endless
    held = [gateway.chat(stream=True, prompt_cache_key="talk") for _ in range(HOME_LEAD + 1)]
    for stream in held:
        next(iter(stream))
    assert asked(tritons)[home] == 1 + HOME_LEAD + 1
    gateway.chat(prompt_cache_key="talk")
    assert asked(tritons)[home] == 1 + HOME_LEAD + 1
    for stream in held:
        stream.close()


def test_a_server_that_is_not_ready_gets_nothing(tritons: list[FakeTriton], gateway: RunningGateway) -> None:
    tritons[1].is_ready = False
    gateway.wait_for_metric(READY, 2)
    for _ in range(4):
        gateway.chat()
    assert asked(tritons) == [2, 0, 2]
    tritons[1].is_ready = True
    gateway.wait_for_metric(READY, 3)
    gateway.chat()
    assert asked(tritons)[1] == 1


def test_the_gateway_is_ready_while_one_server_is(tritons: list[FakeTriton], gateway: RunningGateway) -> None:
    for fake in tritons[1:]:
        fake.is_ready = False
    assert gateway.http.get("/health/ready").status_code == 200
    tritons[0].is_ready = False
    assert gateway.http.get("/health/ready").status_code == 503
    assert gateway.chat().choices, "what was seen may have passed: a request is tried all the same"


@pytest.mark.parametrize("refusal", [OVERLOADED, "Request for unknown model: 'qwen2_5_omni' is not found"])
def test_what_one_server_does_not_take_the_next_one_gets(
    tritons: list[FakeTriton], gateway: RunningGateway, refusal: str
) -> None:
    for fake in tritons[:2]:
        fake.script = failing(refusal)
    assert gateway.chat().choices[0].message.content == "Hello, sea."
    assert asked(tritons) == [1, 1, 1]
    assert gateway.metric(MOVED) == 2


def test_where_no_server_has_room_the_caller_is_told(tritons: list[FakeTriton], gateway: RunningGateway) -> None:
    for fake in tritons:
        fake.script = failing(OVERLOADED)
    with pytest.raises(openai.RateLimitError) as caught:
        gateway.chat()
    assert caught.value.response.headers["retry-after-ms"] == "250"
    assert asked(tritons) == [1, 1, 1]


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("top_p: 2 is over 1 [omni:bad_request;stage=thinker]", 400),
        ("not finite [omni:internal;stage=talker]", 500),
        ("timeout: 3 s have passed [omni:timeout;stage=thinker]", 504),
    ],
)
def test_what_a_stage_refuses_or_fails_at_is_the_answer(
    tritons: list[FakeTriton], gateway: RunningGateway, text: str, status: int
) -> None:
    tritons[0].script = failing(text)
    with pytest.raises(openai.APIStatusError) as caught:
        gateway.chat()
    assert (caught.value.status_code, asked(tritons)) == (status, [1, 0, 0])


def test_a_request_that_breaks_connections_does_not_go_round(
    tritons: list[FakeTriton], gateway: RunningGateway
) -> None:
    for fake in tritons:
        fake.script = breaking
    with pytest.raises(openai.APIStatusError) as caught:
        gateway.chat()
    assert (caught.value.status_code, sum(asked(tritons))) == (503, 2)


def test_a_reply_that_has_begun_is_not_begun_again(tritons: list[FakeTriton], gateway: RunningGateway) -> None:
    tritons[0].script = breaking_midway
    with pytest.raises(openai.APIError, match="ended while the request was under way"):
        list(gateway.chat(stream=True))
    assert asked(tritons) == [1, 0, 0]


def test_of_servers_that_die_one_after_another_new_requests_go_to_the_last() -> None:
    with ExitStack() as stack:
        living = stack.enter_context(serve_grpc(FakeTriton()))
        with serve_grpc(FakeTriton()) as dying:
            running = stack.enter_context(run_gateway(dying.url, living.url))
            running.chat()
        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(lambda _: running.chat().choices[0].message.content, range(24)))
        assert replies == ["Hello, sea."] * 24
        assert (len(dying.requests), len(living.requests)) == (1, 24)
        running.wait_for_metric(READY, 1)


def test_voices_are_those_of_a_server_that_answers(tritons: list[FakeTriton]) -> None:
    with run_gateway("127.0.0.1:9", tritons[0].url) as running:
        assert running.openai.models.list().data[0].id == "qwen2_5_omni"
