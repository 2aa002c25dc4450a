# SPDX-License-Identifier: Apache-2.0
"""Hostile realtime connections, frame by frame: each is bounded, is refused by name, harms no other and leaves nothing.

Events in any order, and with faults, are in test_gateway_realtime_random.py.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from client_fakes import FakeTriton, serve_grpc
from gateway_fakes import TIMEOUT_S, RunningGateway, run_gateway, tracebacks
from realtime_client import MANUAL, greeting, talk
from triton_omni_gateway.realtime.limits import RealtimeLimits
from triton_omni_gateway.realtime.protocol import RealtimeProtocol

SESSIONS = "omni_gateway_realtime_sessions"
TEXT, CONTINUED, BINARY, CLOSE, PING = 1, 0, 2, 8, 9
HUNDRED_MB = 100 << 20
UPGRADE = (
    "GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {'A' * 22}==\r\n\r\n"
).encode()


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton(greeting)) as fake:
        yield fake


@pytest.fixture
def gateway(triton: FakeTriton) -> Iterator[RunningGateway]:
    """Its clients answer no pings, and one reads late on a slow machine."""
    limits = RealtimeLimits(max_sessions=8, ping_seconds=600)
    with run_gateway(triton.url, realtime=limits, max_peer_connections=2000, send_timeout_s=600) as running:
        yield running


def frame(kind: int, data: bytes = b"", *, last: bool = True, length: int | None = None) -> bytes:
    """A frame of a client, masked with zeros; `length` may be another than that of the data."""
    size = len(data) if length is None else length
    head = bytes([0x80 * last | kind])
    if size < 126:
        return head + bytes([0x80 | size]) + bytes(4) + data
    return head + b"\xff" + struct.pack("!Q", size) + bytes(4) + data


def event(kind: str, **fields: Any) -> bytes:
    return frame(TEXT, json.dumps({"type": kind, **fields}).encode())


def opened(gateway: RunningGateway, receive_bytes: int | None = None) -> socket.socket:
    """A session's connection that has read its first event."""
    with ExitStack() as on_failure:
        connection = on_failure.enter_context(gateway.connect(receive_bytes))
        connection.sendall(UPGRADE)
        read_until(connection, b"session.created")
        on_failure.pop_all()
    return connection


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    seen, new = bytearray(), 0
    while seen.find(mark, new) < 0:
        new = max(len(seen) - len(mark), 0)  # megabytes of pongs are not searched again for each piece
        piece = connection.recv(1 << 16)
        assert piece, bytes(seen)
        seen += piece
    return bytes(seen)


def close_code(connection: socket.socket) -> int:
    """The code that the server closes with, in its last frame."""
    seen = b""
    while piece := connection.recv(1 << 16):
        seen += piece
    at = seen.rindex(b"\x88")
    return int(struct.unpack_from("!H", seen, at + 2)[0])


def sessions_of(gateway: RunningGateway) -> list[RealtimeProtocol]:
    return [one for one in gateway.connections if isinstance(one, RealtimeProtocol)]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


NO_FRAMES = {
    "100 MB": (frame(TEXT, length=HUNDRED_MB), 1009),
    "100 MB of bytes": (frame(BINARY, length=HUNDRED_MB), 1009),
    "100 MB in the second piece": (frame(TEXT, b"x", last=False) + frame(CONTINUED, length=HUNDRED_MB), 1009),
    "all that a length can say": (frame(TEXT, length=(1 << 63) - 1), 1009),
    "pieces without end": (frame(TEXT, last=False) + frame(CONTINUED, last=False) * 20_000, 1008),
    "no mask": (b"\x81\x02{}", 1002),
    "a kind that there is not": (frame(3, b"{}"), 1002),
    "a compression that was not agreed on": (b"\xc1" + frame(TEXT, b"{}")[1:], 1002),
    "a long ping": (frame(PING, b"x" * 1000), 1002),
    "a ping in pieces": (frame(PING, b"x", last=False), 1002),
    "the end of nothing": (frame(CONTINUED, b"x"), 1002),
    "a begin in a begin": (frame(TEXT, b"x", last=False) + frame(TEXT, b"x"), 1002),
    "a close of one byte": (frame(CLOSE, b"x"), 1002),
    "a close with a code that there is not": (frame(CLOSE, struct.pack("!H", 999)), 1002),
}


async def test_what_is_no_frame_ends_its_session_alone(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    """A frame of 100 MB is refused by its head: nothing of it is awaited."""
    async with talk(gateway.base, audio=MANUAL["audio"]) as other:
        for name, (sent, code) in NO_FRAMES.items():
            with closing(await asyncio.to_thread(opened, gateway)) as connection:
                connection.sendall(sent)
                assert await asyncio.to_thread(close_code, connection) == code, name
        await other.say("Still here.")
    await asyncio.to_thread(gateway.wait_for_metric, SESSIONS, 0)
    assert tracebacks(caplog.records) == []


async def test_a_text_that_is_none_is_refused_by_name(gateway: RunningGateway) -> None:
    with closing(await asyncio.to_thread(opened, gateway)) as connection:
        connection.sendall(frame(TEXT, b"{\xff", last=False) + frame(CONTINUED, b"\xfe}") + event("nonsense"))
        seen = await asyncio.to_thread(read_until, connection, b"Invalid value for 'type'")
    assert b"The body is not JSON" in seen


def test_answers_to_pings_do_not_pile_up(triton: FakeTriton, gateway: RunningGateway) -> None:
    """A client that takes none gets no more of them, and is heard nevertheless."""
    pings = frame(PING, b"x" * 125) * 1000
    with closing(opened(gateway, receive_bytes=4096)) as connection:
        (served,) = sessions_of(gateway)
        while served.writable.is_set():
            connection.sendall(pings)
        for _ in range(10):
            connection.sendall(pings)
        message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi."}]}
        connection.sendall(event("conversation.item.create", item=message) + event("response.create"))
        while not triton.requests:  # what was sent before is then read
            time.sleep(0.01)
        unsent = served.transport.get_write_buffer_size()
        read_until(connection, b"response.done")
    assert unsent < 10 * len(pings) / 2


def test_a_client_that_sends_no_more_is_gone(triton: FakeTriton, gateway: RunningGateway) -> None:
    triton.script = triton.endless
    with closing(opened(gateway)) as connection:
        message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi."}]}
        connection.sendall(event("conversation.item.create", item=message) + event("response.create"))
        read_until(connection, b"response.output_audio.delta")
        connection.shutdown(socket.SHUT_WR)
        assert triton.cancelled.wait(TIMEOUT_S)
        gateway.wait_for_metric(SESSIONS, 0)


async def test_a_flood_of_responses_is_refused_by_name_and_goes_with_its_client(
    triton: FakeTriton, gateway: RunningGateway
) -> None:
    triton.script = triton.endless
    aside = {"conversation": "none", "instructions": "Tell a story."}
    async with talk(gateway.base, audio=MANUAL["audio"]) as session:
        for number in range(200):
            await session.send("response.create", response=aside, event_id=str(number))
        named = [(await session.until("error")).error for _ in range(196)]
        assert {error.code for error in named} == {"too_many_responses"}
        assert [error.event_id for error in named] == [str(number) for number in range(4, 200)]
        while len(triton.requests) < 4:
            await asyncio.sleep(0.01)
        session.connection._connection.transport.abort()
    assert await asyncio.to_thread(triton.cancelled.wait, TIMEOUT_S)
    await asyncio.to_thread(gateway.wait_for_metric, SESSIONS, 0)
    assert len(triton.requests) == 4


async def test_a_thousand_connects_leave_nothing(gateway: RunningGateway) -> None:
    """Seven more are let in; the others are told to come again, and go. Then the seven go at once."""
    async with talk(gateway.base) as other:
        await other.say("Here.")
        before = open_files()
        host, port = gateway.base.removeprefix("http://").split(":")

        let_in = []

        async def knock() -> bytes:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(UPGRADE)
            head = await reader.readuntil(b"\r\n")
            if head.startswith(b"HTTP/1.1 101 "):
                let_in.append(writer)
            else:
                writer.transport.abort()
            return head

        heads = [head for _ in range(10) for head in await asyncio.gather(*(knock() for _ in range(100)))]
        assert (heads.count(b"HTTP/1.1 101 Switching Protocols\r\n"), len(heads)) == (7, 1000)
        assert sum(head.startswith(b"HTTP/1.1 429 ") for head in heads) == 993
        for writer in let_in:
            writer.transport.abort()
        await other.say("Still here.")
    await asyncio.to_thread(gateway.wait_for_metric, SESSIONS, 0)
    gateway.http.close()
    while sessions_of(gateway) or open_files() > before:
        await asyncio.sleep(0.02)
