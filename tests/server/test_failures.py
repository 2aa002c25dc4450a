# SPDX-License-Identifier: Apache-2.0
"""A sequence that an engine gives up: the client gets the cause, nobody else is harmed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from server.probes import FAILING_TALKER, FAILING_THINKER, FAILING_TOKEN2WAV
from server.serving import Served, wait_for
from server.stacks import doings
from triton_omni.session.ledger_table import STAGES
from triton_omni_client import Internal, Request
from triton_omni_client.messages import UNARY_MODEL
from triton_omni_client.protocol import to_grpc

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


def test_a_failed_test_is_told_what_the_stages_do(server: Served) -> None:
    def tells_of_each_loop() -> bool:
        _, *told = doings(server).split(":\n")
        return all("loop.py" in stacks for _, stacks in zip(STAGES, told, strict=False))

    wait_for(tells_of_each_loop, lambda: doings(server))
