# SPDX-License-Identifier: Apache-2.0
"""Triton's own parameters of a request and counts that are too large, over every way in: obeyed, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from server.probes import SLOW_THINKER
from server.serving import REPLY_S, Served, resident_bytes
from triton_omni.doctor.stage_processes import stage_processes
from triton_omni_client.messages import MODEL, UNARY_MODEL

LONG = {"seed": SLOW_THINKER, "thinker": {"min_tokens": 200, "max_tokens": 200}}
"""A reply that takes eight seconds at least."""
ABOUT_TWO_MINUTES_US, TENTH_OF_A_SECOND_US = 120_000_000, 100_000
MANY = 3_000_000

Asking = Callable[..., str]
"""Asks with parameters and elements of `media`; the error it comes to."""


def message(model: str, parameters: dict[str, Any], media: int = 0, **sampling: Any) -> Any:
    asked = service_pb2.ModelInferRequest(model_name=model)
    for name, value in parameters.items():
        if isinstance(value, int):
            asked.parameters[name].int64_param = value
        else:
            asked.parameters[name].string_param = value
    inputs = {"text_input": b"hello", "sampling_parameters": json.dumps(sampling).encode()}
    for name, element in inputs.items():
        asked.inputs.add(name=name, datatype="BYTES", shape=[1])
        asked.raw_input_contents.append(len(element).to_bytes(4, "little") + element)
    if media:
        asked.inputs.add(name="media", datatype="BYTES", shape=[media])
        asked.raw_input_contents.append(bytes(4 * media))
    return asked


def by_stream(server: Served, parameters: dict[str, Any], **asked: Any) -> str:
    with grpc.insecure_channel(server.supervisor.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = stub.ModelStreamInfer(iter([message(MODEL, parameters, **asked)]), timeout=REPLY_S)
        return next((str(answer.error_message) for answer in answers if answer.error_message), "")


def by_call(server: Served, parameters: dict[str, Any], **asked: Any) -> str:
    with grpc.insecure_channel(server.supervisor.grpc_url) as channel:
        try:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(
                message(UNARY_MODEL, parameters, **asked), timeout=REPLY_S
            )
        except grpc.RpcError as error:
            return str(error.details())
    return ""


def by_infer(server: Served, parameters: dict[str, Any], media: int = 0, **sampling: Any) -> str:
    inputs = {"text_input": ["hello"], "sampling_parameters": [json.dumps(sampling)]}
    if media:
        inputs["media"] = [""] * media
    tensors = [{"name": name, "datatype": "BYTES", "shape": [len(data)], "data": data} for name, data in inputs.items()]
    body = json.dumps({"inputs": tensors, "parameters": parameters})
    status, text = server.post(f"/v2/models/{UNARY_MODEL}/infer", body)
    return "" if status == 200 else str(json.loads(text)["error"])


WAYS: dict[str, Asking] = {"gRPC stream": by_stream, "gRPC call": by_call, "HTTP infer": by_infer}


@pytest.fixture(params=WAYS)
def ask(request: pytest.FixtureRequest) -> Asking:
    return WAYS[request.param]


def test_triton_s_timeout_is_the_request_s_deadline(server: Served, ask: Asking) -> None:
    assert ask(server, {"timeout": ABOUT_TWO_MINUTES_US}, seed=1, thinker={"max_tokens": 3}) == ""
    said = ask(server, {"timeout": TENTH_OF_A_SECOND_US}, timeout=30, **LONG)
    assert "[omni:timeout;" in said
    said = ask(server, {"timeout": ABOUT_TWO_MINUTES_US}, timeout=0.1, **LONG)
    assert "[omni:timeout;" in said, "the sooner of both holds"


@pytest.mark.parametrize("timeout", [3_600_000_001, 2**62])
def test_triton_s_timeout_has_the_deployment_s_limit(server: Served, ask: Asking, timeout: int) -> None:
    said = ask(server, {"timeout": timeout})
    assert f"timeout: {timeout} us (Triton's parameter) is over this deployment's limit of 3600000000 us" in said
    assert "[omni:too_large;" in said


@pytest.mark.parametrize("priority", [1, 100])
def test_triton_s_priority_is_refused_with_the_cure(server: Served, ask: Asking, priority: int) -> None:
    said = ask(server, {"priority": priority})
    assert said.endswith(
        "priority: this parameter of Triton's is not taken, give a priority from -100 to 100 in sampling_parameters "
        "[omni:bad_request]"
    )
    assert ask(server, {"priority": 0}, seed=1, thinker={"max_tokens": 3}) == ""


@pytest.mark.parametrize("key", ["timeout", "priority"])
def test_beside_the_inputs_of_generate_both_are_refused_by_the_place_they_belong_to(server: Served, key: str) -> None:
    status, text = server.post(f"/v2/models/{UNARY_MODEL}/generate", json.dumps({"text_input": "hello", key: 5}))
    assert status == 400
    assert f"{key}: not a field of a request, it belongs into sampling_parameters" in json.loads(text)["error"]


def test_parameters_are_counted(server: Served, ask: Asking) -> None:
    said = ask(server, {f"p{number}": number for number in range(65)})
    assert "parameters: 65 are given, the limit is 64 [omni:too_large;" in said
    said = ask(server, {f"p{number}": number for number in range(20_000)})
    assert "the request has over 1024 inputs, outputs and parameters, which is the limit [omni:too_large;" in said
    said = ask(server, {"p": "x" * 65_536})
    assert "characters of JSON, the limit is 65536 [omni:too_large;" in said


def test_elements_are_counted_before_they_are_unpacked(server: Served, ask: Asking) -> None:
    pid = stage_processes(server.supervisor.pid)["thinker"]
    before = resident_bytes(pid)
    said = ask(server, {}, media=MANY)
    assert f"media: {MANY} elements, the limit of any deployment is 4096 [omni:too_large;" in said
    # Each of its elements would take 8 bytes twice; what stays may be the message in shared memory, 12 MB.
    assert resident_bytes(pid) - before < 40 << 20
    assert "media: text_input has no place for media" in ask(server, {}, media=17), "which was unpacked"
