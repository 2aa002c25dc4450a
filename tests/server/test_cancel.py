# SPDX-License-Identifier: Apache-2.0
"""A client that goes away: every stage stops soon after it is noticed, and nothing is left.

Times are the stages' own, on the system-wide monotonic clock: when a stage noticed, and when each engine dropped the
sequence. The disturbed seeds make replies that last seconds, so that a cancel meets the moment it is meant for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from server.probes import CRAWLING_THINKER, SLOW_TALKER, SLOW_THINKER, SLOW_TOKEN2WAV
from server.serving import STAGES, Served, check_in_time, in_time_once, wait_for
from triton_omni_client import OmniClient, Request
from triton_omni_client.messages import UNARY_MODEL
from triton_omni_client.protocol import to_grpc

NOTICE_S = 1.0
"""A heartbeat leaves every 0.1 s and notices; the rest is for a machine with other work to do."""
STOP_S = 0.3
"""From a stage's notice to an engine's drop, beside the step that this engine is in."""
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


MOMENTS: dict[str, tuple[int, str, Ready]] = {
    "in prefill": (CRAWLING_THINKER, LONG_PROMPT, in_prefill),
    "while generating": (SLOW_THINKER, "hello", generating),
    "while the talker speaks": (SLOW_TALKER, "hello", after_thinkers_end),
    "while token2wav works": (SLOW_TOKEN2WAV, "hello", after_thinkers_end),
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


@in_time_once
def cancel_one(server: Served, way: str, moment: str) -> None:
    """Ask, cancel at the moment, and see that every engine drops it in time."""
    seed, text, ready = MOMENTS[moment]
    request_id = f"cancel: {way}, {moment}, {time.monotonic_ns()}"
    request = Request(text=text, seed=seed, request_id=request_id, voice="Chelsie", talker={"temperature": 0})
    with WAYS[way](server, request) as cancel:
        wait_for(lambda: ready(server, request_id), lambda: f"never {moment}")
        cancelled_ns = time.monotonic_ns()
        cancel()
        for stage in STAGES:
            wait_for(lambda stage=stage: server.records.of(request_id, stage, "aborted"), lambda: "still running")
    noticed = min(found["ns"] for stage in STAGES for found in server.records.of(request_id, stage, "noticed"))
    assert cancelled_ns < noticed
    check_in_time(noticed - cancelled_ns, NOTICE_S, "noticed")
    for stage in STAGES:
        dropped = server.records.of(request_id, stage, "aborted")[0]["ns"]
        check_in_time(dropped - noticed - longest_step(server, stage, noticed), STOP_S, f"dropped by {stage}")
    for event in server.records.received(request_id, "token2wav"):
        check_in_time(event["ns"] - noticed - longest_step(server, "talker", noticed), STOP_S, "codes came")


def longest_step(server: Served, stage: str, since_ns: int) -> int:
    """Nanoseconds of the engine's longest step that had not ended at this moment; 0 for steps not worth a record."""
    steps = [event for event in server.records.events(stage) if event["event"] == "long step"]
    return max((step["ns"] - step["began_ns"] for step in steps if step["ns"] > since_ns), default=0)


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
