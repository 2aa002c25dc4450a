# SPDX-License-Identifier: Apache-2.0
"""A sequence that an engine gives up, and an engine that dies: the client gets the cause, nobody else is harmed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from server.probes import BREAKING_TALKER, FAILING_TALKER, FAILING_THINKER, FAILING_TOKEN2WAV, SLOW_THINKER
from server.serving import Served, serve, wait_for
from triton_omni_client import Internal, OmniClientError, Request
from triton_omni_client.messages import UNARY_MODEL
from triton_omni_client.protocol import to_grpc

STOP_S = 10.0
"""On two cores a server stops in 5 s; one that leaked a request waits 30 s for it."""

FAILING = {"thinker": FAILING_THINKER, "talker": FAILING_TALKER, "token2wav": FAILING_TOKEN2WAV}


@pytest.mark.parametrize("stage", FAILING)
def test_failed_sequence_ends_its_stream_with_the_cause_and_harms_no_other(server: Served, stage: str) -> None:
    others = {"why": 61, "x": 62, "Hi.": 63}
    alone = {text: server.ask(f"beside {stage}, alone: {text}", text, seed=seed) for text, seed in others.items()}
    with ThreadPoolExecutor(4) as pool:
        running = {
            text: pool.submit(server.ask, f"beside {stage}: {text}", text, seed=seed) for text, seed in others.items()
        }
        failing = pool.submit(server.ask, f"failing {stage}", "hello", seed=FAILING[stage])
        error = failing.exception()
    assert isinstance(error, Internal)
    assert error.stage == stage
    assert "injected: not finite" in error.message
    for text, future in running.items():
        assert future.result().text == alone[text].text
        assert server.records.codes(f"beside {stage}: {text}") == server.records.codes(f"beside {stage}, alone: {text}")


@pytest.mark.parametrize("stage", FAILING)
def test_failed_sequence_fails_a_unary_request_with_triton_s_code(server: Served, stage: str) -> None:
    request = Request(text="hello", seed=FAILING[stage], request_id=f"unary failing {stage}")
    message = to_grpc(request, UNARY_MODEL)
    message.parameters.clear()
    with grpc.insecure_channel(server.supervisor.grpc_url) as channel, pytest.raises(grpc.RpcError) as caught:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details().endswith(f"injected: not finite [omni:internal;stage={stage}]")
    body = json.dumps({"text_input": "hello", "sampling_parameters": json.dumps(request.sampling_parameters())})
    status, text = server.post(f"/v2/models/{UNARY_MODEL}/generate", body)
    assert status == 400
    assert f"injected: not finite [omni:internal;stage={stage}]" in text


def test_dead_engine_fails_what_is_open_and_the_server_stops_while_it_is_started_again(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    with serve(tmp_path, tiny_checkpoint) as server:
        running = server.client.stream(Request(text="hello", seed=SLOW_THINKER, request_id="open"))
        next(running)
        for failing in (lambda: server.ask("breaking", "hello", seed=BREAKING_TALKER), running.collect):
            with pytest.raises(Internal) as caught:
                failing()
            assert_names_the_dead_engine(caught.value)
        wait_for(lambda: not server.client.ready(), 5, server.log)
        wait_for(lambda: server.log().count("loading: talker:1") == 2, 10, server.log)
        assert server.supervisor.stop() < STOP_S


def assert_names_the_dead_engine(error: OmniClientError) -> None:
    assert error.stage == "talker"
    assert "the engine of talker failed: RuntimeError" in error.message
    assert "the device is lost" not in error.message, "the cause is for the log, not for clients"
