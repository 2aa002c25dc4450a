# SPDX-License-Identifier: Apache-2.0
"""The shipped Envoy, running before a server that takes every call: what it passes on and what it answers itself."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

import grpc
import httpx
import pytest
from scripts.attacks import HEADERS, PREFACE, RESET, SETTINGS, call, connect, frame
from scripts.compare import balancer
from tritonclient.grpc import service_pb2, service_pb2_grpc

SERVING = b"\x08\x01"
"""A `HealthCheckResponse`."""


LONG = b"long"
"""The message of a stream that is answered by 8 MB."""
STREAMS = 48
WINDOW = 4
"""The setting of HTTP/2 that says what each stream may be sent before it is read."""


class TakesAll(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers health checks, streams by an empty message each or by 8 MB, and other calls by an empty message."""

    sent = 0
    """Messages of all long answers."""

    def service(self, details: Any) -> Any:
        if details.method.endswith("ModelStreamInfer"):
            return grpc.stream_stream_rpc_method_handler(lambda messages, _: self.answers(messages))
        answer = SERVING if details.method == "/grpc.health.v1.Health/Check" else b""
        return grpc.unary_unary_rpc_method_handler(lambda *_: answer)

    def answers(self, messages: Iterator[bytes]) -> Iterator[bytes]:
        for message in messages:
            for _ in range(160 if message == LONG else 0):
                self.sent += 1
                yield bytes(50_000)
            yield b""


@pytest.fixture(scope="module")
def takes_all() -> Iterator[tuple[TakesAll, str]]:
    """The server, and its address."""
    with ThreadPoolExecutor(STREAMS + 8) as pool:
        handler = TakesAll()
        server = grpc.server(pool, handlers=[handler])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield handler, f"127.0.0.1:{port}"
        server.stop(None)


@pytest.fixture(scope="module")
def configuration(takes_all: tuple[TakesAll, str]) -> dict[str, Any]:
    return balancer.on_loopback([takes_all[1]])


@pytest.fixture(scope="module")
def front(configuration: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Envoy's address of gRPC."""
    with balancer.run_envoy(configuration, tmp_path_factory.mktemp("envoy")) as (url, _):
        yield url


def ask(front: str, call: str, encoding: grpc.Compression) -> Any:
    message = service_pb2.ModelInferRequest(raw_input_contents=[bytes(1000)])
    with grpc.insecure_channel(front, compression=encoding) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return (
            stub.ModelInfer(message, timeout=100)
            if call == "ModelInfer"
            else next(stub.ModelStreamInfer(iter([message])))
        )


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


def held_bytes(configuration: dict[str, Any]) -> int:
    """Memory that Envoy has allocated."""
    admin = configuration["admin"]["address"]["socket_address"]["port_value"]
    return int(httpx.get(f"http://127.0.0.1:{admin}/memory", timeout=100).json()["allocated"])


@pytest.mark.parametrize("window", [0, 2**31 - 1])
def test_streams_that_nobody_reads_hold_up_no_other_and_take_little_memory(
    takes_all: tuple[TakesAll, str], configuration: dict[str, Any], front: str, window: int
) -> None:
    before, sent, room = held_bytes(configuration), takes_all[0].sent, 2 * STREAMS << 17
    with ExitStack() as stack:
        for _ in range(6):
            connection = stack.enter_context(connect(front))
            connection.sendall(PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", WINDOW, window)))
            connection.sendall(frame(8, 0, 0, b"\x7f\xff\0\0"))
            for number in range(STREAMS // 6):
                connection.sendall(call("ModelStreamInfer", number))
                connection.sendall(frame(0, 0, 2 * number + 1, struct.pack(">BI", 0, len(LONG)) + LONG))
        wait_until_full(takes_all[0], sent)
        for _ in range(8):
            assert ask(front, "ModelInfer", grpc.Compression.NoCompression) is not None
        assert held_bytes(configuration) - before < room + (8 << 20)


def wait_until_full(handler: TakesAll, begin: int) -> None:
    """Wait until more than `begin` messages of long answers were sent, and no more are."""
    seen = begin
    while handler.sent != seen or seen == begin:
        seen = handler.sent
        time.sleep(0.5)


def test_a_stream_that_sends_nothing_gives_its_place_back(takes_all: tuple[TakesAll, str], tmp_path: Path) -> None:
    hasty = balancer.on_loopback([takes_all[1]])
    manager = hasty["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    for name in ("stream_idle_timeout", "request_headers_timeout"):
        assert manager[name] != "0s"
        manager[name] = "1s"
    with balancer.run_envoy(hasty, tmp_path) as (url, _), grpc.insecure_channel(url) as channel:
        stub, never = service_pb2_grpc.GRPCInferenceServiceStub(channel), threading.Event()
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.ModelStreamInfer(iter(never.wait, None), timeout=600))
        assert caught.value.details() == "stream timeout"
        never.set()
        with connect(url) as connection:
            connection.sendall(PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, 0, 1, b"\x83"))
            assert wait_for_frame(connection.makefile("rb"), stream=1) in (HEADERS, RESET)


@pytest.mark.parametrize("full", ["connections", "memory"])
def test_a_full_envoy_still_answers_its_probes(takes_all: tuple[TakesAll, str], tmp_path: Path, full: str) -> None:
    """One that does not is ended by Kubernetes, with all replies."""
    small = balancer.on_loopback([takes_all[1]])
    memory, connections = small["overload_manager"]["resource_monitors"]
    with ExitStack() as stack:
        if full == "memory":
            memory["typed_config"]["max_heap_size_bytes"] = 1
        else:
            connections["typed_config"]["max_active_downstream_connections"] = 3
        url, operators = stack.enter_context(balancer.run_envoy(small, tmp_path))
        for _ in range(3):
            stack.enter_context(connect(url)).sendall(PREFACE + frame(SETTINGS, 0, 0))
        wait_until_refused(url)
        assert httpx.get(f"{operators}/ready", timeout=100).text == "LIVE\n"


def wait_until_refused(url: str) -> None:
    """Envoy looks at its memory four times a second."""
    with suppress(grpc.RpcError):
        while True:
            ask(url, "ModelInfer", grpc.Compression.NoCompression)


def wait_for_frame(received: BinaryIO, stream: int) -> int:
    """The kind of the next frame of a stream."""
    while True:
        head = received.read(9)
        received.read(int.from_bytes(head[:3]))
        if int.from_bytes(head[5:]) == stream:
            return head[3]
