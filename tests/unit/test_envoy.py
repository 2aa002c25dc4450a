# SPDX-License-Identifier: Apache-2.0
"""The shipped Envoy, running before a server that takes every call: what it passes on and what it answers itself."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from scripts.compare import balancer
from tritonclient.grpc import service_pb2, service_pb2_grpc

SERVING = b"\x08\x01"
"""A `HealthCheckResponse`."""


class TakesAll(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers health checks, and other calls by an empty message each."""

    def service(self, details: Any) -> Any:
        if details.method.endswith("ModelStreamInfer"):
            return grpc.stream_stream_rpc_method_handler(lambda messages, _: (b"" for _ in messages))
        answer = SERVING if details.method == "/grpc.health.v1.Health/Check" else b""
        return grpc.unary_unary_rpc_method_handler(lambda *_: answer)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Envoy's address of gRPC."""
    with ThreadPoolExecutor(8) as pool:
        server = grpc.server(pool, handlers=[TakesAll()])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        configuration = balancer.on_loopback([f"127.0.0.1:{port}"])
        with balancer.run_envoy(configuration, tmp_path_factory.mktemp("envoy")) as (url, _):
            yield url
        server.stop(None)


def ask(front: str, call: str, encoding: grpc.Compression) -> Any:
    message = service_pb2.ModelInferRequest(raw_input_contents=[bytes(1000)])
    with grpc.insecure_channel(front, compression=encoding) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return stub.ModelInfer(message) if call == "ModelInfer" else next(stub.ModelStreamInfer(iter([message])))


@pytest.mark.parametrize("call", ["ModelInfer", "ModelStreamInfer"])
@pytest.mark.parametrize("encoding", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_messages_are_refused_with_the_cure(front: str, call: str, encoding: grpc.Compression) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        ask(front, call, encoding)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert caught.value.details() == "grpc-encoding: compressed messages are not taken, send them plain"


@pytest.mark.parametrize("call", ["ModelInfer", "ModelStreamInfer"])
def test_plain_messages_are_passed_on(front: str, call: str) -> None:
    assert ask(front, call, grpc.Compression.NoCompression) is not None
