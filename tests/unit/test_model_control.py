# SPDX-License-Identifier: Apache-2.0
"""Loading and unloading over gRPC, before a stand-in for tritonserver that wants the key of its command line."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc  # type: ignore[import-untyped]

from triton_omni.supervisor.model_control import HEADER, KEY_VARIABLE, ModelControl, ModelControlError, operator_key


class Triton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Answers what the test says to whoever has the key."""

    def __init__(self) -> None:
        self.key = ""
        self.calls: list[tuple[str, str]] = []
        self.refusal: str | None = None
        self._server = grpc.server(ThreadPoolExecutor(2))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.url = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()

    def RepositoryModelLoad(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._called("load", request.model_name, context)
        return service_pb2.RepositoryModelLoadResponse()

    def RepositoryModelUnload(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._called("unload", request.model_name, context)
        return service_pb2.RepositoryModelUnloadResponse()

    def _called(self, call: str, model: str, context: Any) -> None:
        self.calls.append((call, model))
        given = dict(context.invocation_metadata()).get(f"triton-grpc-protocol-{HEADER}")
        if given != self.key:
            context.abort(grpc.StatusCode.UNAVAILABLE, "This protocol is restricted")
        if self.refusal is not None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.refusal)


@pytest.fixture
def triton() -> Iterator[Triton]:
    triton = Triton()
    yield triton
    triton.stop()


@pytest.fixture
def control(triton: Triton) -> ModelControl:
    made = ModelControl(triton.url, 10.0)
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in made.flags)
    assert flags["model-control-mode"] == "explicit"
    assert flags["load-model"] == "*"
    apis, _, triton.key = flags["http-restricted-api"].partition(f":{HEADER}=")
    protocols, _, key = flags["grpc-restricted-protocol"].partition(f":{HEADER}=")
    assert key == triton.key
    assert protocols == apis == "model-repository,statistics,trace,logging,shared-memory"
    return made


def test_models_are_loaded_and_unloaded_with_the_key(triton: Triton, control: ModelControl) -> None:
    control.unload("talker")
    control.load("talker")
    assert triton.calls == [("unload", "talker"), ("load", "talker")]


def test_every_server_has_a_key_of_its_own(triton: Triton, control: ModelControl) -> None:
    del control
    other = ModelControl(triton.url, 10.0)
    with pytest.raises(ModelControlError, match="restricted"):
        other.load("talker")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("load failed: no memory\n\nAt:\n  model.py", "^load failed: no memory$"),
        ("\nlate", "^late$"),
        ("", "^no reason was given$"),
    ],
)
def test_a_refusal_is_told_in_one_line(triton: Triton, control: ModelControl, said: str, reason: str) -> None:
    triton.refusal = said
    with pytest.raises(ModelControlError, match=reason):
        control.load("talker")


def test_a_server_that_is_gone_is_told(triton: Triton, control: ModelControl) -> None:
    triton.stop()
    with pytest.raises(ModelControlError, match="failed to connect"):
        control.load("talker")


def test_a_proxy_of_the_environment_is_not_asked(
    triton: Triton, control: ModelControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    control.load("talker")
    assert triton.calls == [("load", "talker")]


@pytest.mark.parametrize("allowed", [True, False])
def test_clients_share_memory_where_the_operator_lets_them_and_over_grpc_alone(allowed: bool) -> None:
    made = ModelControl("127.0.0.1:1", 10.0, "k" * 16, client_shared_memory=allowed)
    protocols, apis = sorted(flag.partition("=")[2].split(":")[0] for flag in made.flags if "restricted" in flag)
    assert apis == "model-repository,statistics,trace,logging,shared-memory"
    assert protocols == (apis.removesuffix(",shared-memory") if allowed else apis)


def test_an_operator_may_set_the_key() -> None:
    key = "a-key_of-16-more"
    made = ModelControl("127.0.0.1:1", 10.0, operator_key({KEY_VARIABLE: key}))
    assert [flag.endswith(f":{HEADER}={key}") for flag in made.flags[2:]] == [True, True]
    assert operator_key({}) is operator_key({KEY_VARIABLE: ""}) is None


@pytest.mark.parametrize("key", ["short", "of spaces and more of them", "x" * 129, "ends-the-flag:a=b"])
def test_a_key_that_is_none_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(ValueError, match=f"{KEY_VARIABLE} must be 16 to 128 letters") as caught:
        operator_key({KEY_VARIABLE: key})
    assert key not in str(caught.value)
