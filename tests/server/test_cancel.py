# SPDX-License-Identifier: Apache-2.0
"""A client that goes away: no stage begins another step once it is noticed, and nothing is left.

The stages' own times tell the order, on the system-wide monotonic clock: when a stage noticed, and when each engine
dropped the sequence. The disturbed seeds make replies of half a minute. So a cancel meets the moment it is meant for,
and is noticed before the reply's end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from server.probes import CRAWLING_THINKER, SLOW_TALKER, SLOW_THINKER, SLOW_TOKEN2WAV
from server.serving import Served, wait_for
from triton_omni.session.ledger_table import STAGES
from triton_omni_client import OmniClient, Request
from triton_omni_client.messages import UNARY_MODEL
from triton_omni_client.protocol import to_grpc

LONG: dict[str, Any] = {"thinker": {"min_tokens": 200, "max_tokens": 200}, "talker": {"temperature": 0}}
SHORT: dict[str, Any] = {
    "thinker": {"max_tokens": 40},
    "talker": {"temperature": 0, "min_tokens": 500, "max_tokens": 500},
}
LONG_PROMPT = "Tell me about the sea. " * 36

Ready = Callable[[Served, str], bool]


def in_prefill(server: Served, request_id: str) -> bool:
    return bool(opened(server, request_id)) and not server.records.tokens(request_id)


def generating(server: Served, request_id: str) -> bool:
    return bool(opened(server, request_id)) and len(server.records.codes(request_id)) > 0


def after_thinkers_end(server: Served, request_id: str) -> bool:
    return bool(opened(server, request_id)) and bool(server.records.of(request_id, "thinker", "finished"))


def opened(server: Served, request_id: str) -> list[object]:
    return [event for event in server.records.events("token2wav") if event.get("request_id") == request_id]


MOMENTS: dict[str, tuple[int, str, dict[str, Any], Ready]] = {
    "in prefill": (CRAWLING_THINKER, LONG_PROMPT, LONG, in_prefill),
    "while generating": (CRAWLING_THINKER, "hello", LONG, generating),
    "while the talker speaks": (SLOW_TALKER, "hello", SHORT, after_thinkers_end),
    "while token2wav works": (SLOW_TOKEN2WAV, "hello", SHORT, after_thinkers_end),
}


@contextmanager
def stream_cancelled(server: Served, request: Request) -> Iterator[Callable[[], None]]:
    stream = server.client.stream(request)
    yield stream.close


@contextmanager
def channel_closed(server: Served, request: Request) -> Iterator[Callable[[], None]]:
    client = OmniClient(server.supervisor.grpc_url)
    stream = client.stream(request)
    yield client.close
    del stream


@contextmanager
def http_stream_closed(server: Served, request: Request) -> Iterator[Callable[[], None]]:
    stream = server.http.stream(request)
    yield stream.close


@contextmanager
def unary_cancelled(server: Served, request: Request) -> Iterator[Callable[[], None]]:
    message = to_grpc(request, UNARY_MODEL)
    message.parameters.clear()
    with grpc.insecure_channel(server.supervisor.grpc_url) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer.future(message)
        yield call.cancel
        assert call.cancelled()


WAYS = {
    "stream cancelled": stream_cancelled,
    "connection closed": channel_closed,
    "HTTP stream closed": http_stream_closed,
    "unary call cancelled": unary_cancelled,
}
CASES = [("stream cancelled", moment) for moment in MOMENTS] + [
    (way, "while generating") for way in WAYS if way != "stream cancelled"
]


@pytest.mark.parametrize(("way", "moment"), CASES)
def test_cancel_stops_every_stage_and_leaves_nothing(server: Served, way: str, moment: str) -> None:
    cancel_one(server, way, moment)
    reply = server.ask(f"after {way}, {moment}", "hello", seed=1)
    assert reply.info is not None
    assert reply.info.samples == len(reply.audio) > 0


def cancel_one(server: Served, way: str, moment: str) -> None:
    """Ask, cancel at the moment, and see that every engine drops it."""
    seed, text, options, ready = MOMENTS[moment]
    request_id = f"cancel: {way}, {moment}, {time.monotonic_ns()}"
    request = Request(text=text, seed=seed, request_id=request_id, voice="Chelsie", **options)
    with WAYS[way](server, request) as cancel:
        wait_for(lambda: ready(server, request_id), lambda: f"never {moment}")
        cancelled_ns = time.monotonic_ns()
        cancel()
        wait_for(lambda: bool(server.records.of(request_id, "thinker", "aborted")), lambda: "still running")
    noticed = min(found["ns"] for stage in STAGES for found in server.records.of(request_id, stage, "noticed"))
    assert cancelled_ns < noticed
    check_dropped(server, server.records.key(request_id), noticed)


def check_dropped(server: Served, key: str, noticed_ns: int, stages: Sequence[str] = STAGES) -> None:
    """Each of these engines drops a session, with one more step at most than the one it was in when a stage noticed.

    A stage looks after its sessions before each step, and may have looked just before the notice.
    """

    def dropped(stage: str) -> list[int]:
        events = server.records.events(stage)
        return [found["ns"] for found in events if (found["event"], found["key"]) == ("aborted", key)]

    for stage in stages:
        wait_for(lambda stage=stage: bool(dropped(stage)), lambda stage=stage: f"still running in {stage}")
        events, dropped_ns = server.records.events(stage), dropped(stage)[0]
        steps = [found for found in events if found["event"] == "long step"]
        assert sum(noticed_ns < step["began_ns"] < step["ns"] < dropped_ns for step in steps) <= 1, stage
        given = [found for found in events if found["key"] == key and found["event"] in ("tokens", "spoken")]
        assert sum(found["ns"] > noticed_ns for found in given) <= 2, stage


def test_many_cancelled_at_once_leave_nothing_and_harm_no_other(server: Served) -> None:
    expected = server.ask("undisturbed", "why", seed=51)
    doomed = [
        server.client.stream(Request(text="hello", seed=SLOW_THINKER, request_id=f"doomed {i}")) for i in range(6)
    ]
    spared = server.client.stream(Request(text="why", seed=51, request_id="spared"))
    for stream in doomed:
        next(stream)
        stream.close()
    reply = spared.collect()
    assert reply.text == expected.text
    assert server.records.codes("spared") == server.records.codes("undisturbed")


def test_deadline_of_a_request_ends_it_with_a_timeout(server: Served) -> None:
    body = json.dumps(
        {"text_input": "hello", "sampling_parameters": json.dumps({"seed": SLOW_THINKER, "timeout": 0.7})}
    )
    status, text = server.post("/v2/models/qwen2_5_omni_unary/generate", body)
    assert status == 400
    assert "timeout: 0.7 s have passed [omni:timeout;stage=thinker]" in text
