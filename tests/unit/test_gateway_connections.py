# SPDX-License-Identifier: Apache-2.0
"""Connections without a request under way: how much one may send, how long it may wait, how many there are, the log."""

from __future__ import annotations

import json
import logging
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from client_fakes import FakeTriton, chunk, final, serve_grpc
from gateway_command import started
from gateway_fakes import MODEL, TIMEOUT_S, USER, run_gateway, tracebacks
from triton_omni_gateway import connections
from triton_omni_gateway.connections import CHUNK_BYTES, MAX_HEAD_BYTES, SMALL_CHUNKS, BoundedProtocol, allow_open_files
from triton_omni_gateway.logs import EVERY_S, Repeats
from triton_omni_gateway.settings import GatewaySettings, SettingsError

GET = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED += b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton()) as fake:
        yield fake


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed it, seen without waiting."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def read_to_end(connection: socket.socket) -> bytes:
    answer = b""
    while part := connection.recv(65536):
        answer += part
    return answer


def sent_until_closed(connection: socket.socket, piece: bytes, most: int, pause_s: float = 0.0) -> bytes:
    """What comes back while pieces are sent, to the connection's end; fails where `most` pieces are taken."""
    connection.settimeout(pause_s)
    answer = b""
    for _ in range(most):
        try:
            connection.sendall(piece)
            while part := connection.recv(65536):
                answer += part
        except (TimeoutError, BlockingIOError):
            continue
        except OSError:
            return answer
        return answer
    raise AssertionError(f"still open after {most} pieces")


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET /", b"a" * 4096),
        (GET + b"X: ", b"a" * 4096),
        (GET, b"X: a\r\n" * 512),
        (b"", b"\x16\x03\x01" * 1024),
        (CHUNKED + b"1;", b"a" * 4096),
        (CHUNKED + b"1\r\n{\r\n0\r\n", b"X: a\r\n" * 512),
    ],
    ids=["line", "header", "headers", "no HTTP", "chunk extension", "trailers"],
)
def test_what_http_keeps_whole_ends_at_a_limit(triton: FakeTriton, begin: bytes, piece: bytes) -> None:
    with run_gateway(triton.url) as gateway, gateway.connect() as connection:
        connection.sendall(begin)
        answer = sent_until_closed(connection, piece, 100_000, 0.01)
        assert gateway.post({"model": MODEL, "messages": USER}).status_code == 200
    # A sender that goes on may lose the answer to the end of its connection.
    assert answer.startswith(b"HTTP/1.1 400 ") or not answer
    assert len(triton.requests) == 1


def test_a_head_over_the_limit_is_refused_in_openai_s_form(triton: FakeTriton) -> None:
    with run_gateway(triton.url) as gateway, gateway.connect() as connection:
        connection.sendall(GET + b"X: " + b"a" * MAX_HEAD_BYTES)
        head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["message"].endswith(f"its head is over {MAX_HEAD_BYTES} bytes.")
        assert gateway.http.get("/health/live", headers={"X": "a" * (MAX_HEAD_BYTES - 1024)}).status_code == 200


@pytest.mark.parametrize("size", [1, 16, 100])
def test_a_body_of_many_small_chunks_is_refused(triton: FakeTriton, size: int) -> None:
    """A million of one byte held the event loop for seven seconds."""
    chunk = b"%x\r\n%s\r\n" % (size, b" " * size)
    patient: dict[str, Any] = {"body_timeout_s": 600, "max_body_bytes": 1 << 40}
    with run_gateway(triton.url, **patient) as gateway, gateway.connect() as connection:
        connection.sendall(CHUNKED + chunk * (SMALL_CHUNKS // 2))
        assert not is_closed(connection)
        answer = sent_until_closed(connection, chunk * SMALL_CHUNKS, 10_000, 0.01)
        assert gateway.post({"model": MODEL, "messages": USER}).status_code == 200
    assert b"over 4096 chunks of under 1024 bytes" in answer or not answer


@pytest.mark.parametrize(
    "lengths",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n",
        b"Content-Length: 7\r\ntransfer-encoding:\tchunked\r\n",
        b"Content-Length: 3\r\nContent-Length: 4\r\n",
    ],
)
def test_a_body_of_two_lengths_is_refused(triton: FakeTriton, lengths: bytes) -> None:
    """Else the request that follows may be one for the gateway, and a part of this body for a proxy before it."""
    asked = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with run_gateway(triton.url) as gateway, gateway.connect() as connection:
        connection.sendall(asked + lengths + b"\r\n0\r\n\r\n")
        answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"has both Content-Length and Transfer-Encoding" in answer
    assert not triton.requests


def test_a_body_of_many_large_chunks_is_read(triton: FakeTriton) -> None:
    body = json.dumps({"model": MODEL, "messages": USER}).encode().ljust(3 * SMALL_CHUNKS * CHUNK_BYTES)
    with run_gateway(triton.url) as gateway:
        pieces = (body[at : at + CHUNK_BYTES] for at in range(0, len(body), CHUNK_BYTES))
        assert gateway.post(pieces).status_code == 200


@pytest.mark.parametrize("path", ["health/live", "page/app.js", "v1/models"])
@pytest.mark.parametrize("count", [2, 100, 2000])
def test_of_requests_that_are_sent_ahead_the_first_alone_is_answered(triton: FakeTriton, count: int, path: str) -> None:
    """The page's files, asked for so on one connection, took 60 MiB of memory a second."""
    with run_gateway(triton.url) as gateway, gateway.connect() as connection:
        connection.sendall(f"GET /{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * count)
        answer = b""
        # A connection that is closed before all that came was read may be reset.
        with suppress(ConnectionResetError):
            while part := connection.recv(65536):
                answer += part
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_bytes_that_are_no_http_in_the_middle_of_an_answer_close_the_connection(
    triton: FakeTriton, caplog: pytest.LogCaptureFixture
) -> None:
    with run_gateway(triton.url, max_body_bytes=10) as gateway, gateway.connect() as connection:
        connection.sendall(CHUNKED + b"b\r\n{0123456789\r\n")
        answer = b""
        while not answer.endswith(b"}}"):
            answer += connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 413 ")
        sent_until_closed(connection, b"no length\r\n", 1, TIMEOUT_S)
    assert not tracebacks(caplog.records)


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"", b""),
        (b"GET / HTTP/1.1\r\nX: ", b"a"),
        (GET + b"\r\n", b"\r\n"),
        (GET + b"\r\n", b"G"),
        (GET + b"Content-Length: 999999\r\n\r\n", b"a"),
    ],
    ids=["silent", "slow head", "blank lines after an answer", "slow second head", "body after its answer"],
)
def test_a_head_that_does_not_come_in_time_closes_the_connection(
    triton: FakeTriton, begin: bytes, piece: bytes
) -> None:
    with run_gateway(triton.url, head_timeout_s=0.3) as gateway, gateway.connect() as connection:
        connection.sendall(begin)
        sent_until_closed(connection, piece, 5000, 0.02)
        gateway.wait_until_live()


class _Timer:
    def __init__(self, call: Callable[[], None], when: float) -> None:
        self.call, self._when = call, when

    def when(self) -> float:
        return self._when

    def cancel(self) -> None:
        pass


class _Loop:
    def __init__(self) -> None:
        self.timers: list[_Timer] = []

    def call_later(self, _seconds: float, call: Callable[[], None]) -> _Timer:
        self.timers.append(_Timer(call, len(self.timers)))
        return self.timers[-1]


class _Transport:
    """Which tells that it was aborted, and calls nobody."""

    unsent = 0
    is_aborted = False

    def get_extra_info(self, _name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.is_aborted = True


def accepted(count: int, loop: _Loop, unsent: Sequence[int] = (), **limits: int) -> list[_Transport]:
    """The transports of so many connections that uvicorn's loop accepts in one turn."""
    config, state = uvicorn.Config(lambda: None, log_config=None), ServerState()
    transports = [_Transport() for _ in range(count)]
    for transport, size in zip_longest(transports, unsent, fillvalue=0):
        transport.unsent = size
        protocol = BoundedProtocol(GatewaySettings(**limits), config, state, {}, loop)  # type: ignore[arg-type]
        protocol.connection_made(transport)  # type: ignore[arg-type]
    return transports


@pytest.mark.parametrize(
    ("unsent", "kept"), [([], [5, 6, 7]), ([1], [0, 6, 7]), ([0, 1, 0, 1, 1], [1, 3, 4]), ([1] * 8, [0, 1, 2])]
)
@pytest.mark.parametrize("limit", ["max_connections", "max_peer_connections"])
def test_of_many_at_once_those_stay_that_came_last_or_still_send(
    unsent: list[int], kept: list[int], limit: str
) -> None:
    transports = accepted(8, _Loop(), unsent, **{limit: 3})
    assert [place for place, transport in enumerate(transports) if not transport.is_aborted] == kept


@pytest.mark.parametrize(
    ("unsent", "closed_at"), [([0], 0), ([9, 9], 1), ([9, 8, 5, 0], 3), ([9, 3, 3, 0], 2), ([5, 6, 1, 0], 3)]
)
def test_an_answer_that_still_leaves_is_not_cut_off(unsent: list[int], closed_at: int) -> None:
    loop = _Loop()
    (transport,) = accepted(1, loop)
    for look, left in enumerate(unsent):
        transport.unsent = left
        loop.timers[-1].call()
        assert transport.is_aborted == (look == closed_at)
        if transport.is_aborted:
            return
    raise AssertionError("never closed")


@pytest.mark.parametrize("begin", [b"", b"GET / HTTP/1.1\r\nX: a", GET + b"\r\n"])
@pytest.mark.parametrize("limit", ["max_connections", "max_peer_connections"])
def test_connections_that_wait_make_room_for_others(
    triton: FakeTriton, capfd: pytest.CaptureFixture[str], limit: str, begin: bytes
) -> None:
    limits: dict[str, Any] = {limit: 4, "head_timeout_s": 600}
    with run_gateway(triton.url, **limits) as gateway, ExitStack() as stack:
        held = []
        for _ in range(12):
            held.append(stack.enter_context(gateway.connect()))
            held[-1].sendall(begin)
            answer = b""
            while begin.endswith(b"\r\n\r\n") and b"live" not in answer:
                answer += held[-1].recv(4096)
            # Another caller is served while they are held, on a connection accepted after the last of them.
            with httpx.Client(base_url=gateway.base, timeout=TIMEOUT_S) as other:
                assert other.get("/health/ready").status_code == 200
        assert sum(not is_closed(one) for one in held) <= 4
        assert f"--{limit.replace('_', '-')}" in capfd.readouterr().err


def test_a_request_under_way_keeps_its_connection(triton: FakeTriton) -> None:
    go_on = threading.Event()

    def script(_request: Any, _context: Any) -> Iterator[Any]:
        yield chunk(text="first")
        assert go_on.wait(TIMEOUT_S)
        yield final()

    triton.script = script
    with run_gateway(triton.url, max_connections=2) as gateway, ExitStack() as stack:
        streams = [gateway.chat(stream=True), gateway.chat(stream=True)]
        for stream in streams:
            assert next(stream).choices[0].delta.role == "assistant"
        refused = stack.enter_context(gateway.connect())
        refused.sendall(GET + b"\r\n")
        with pytest.raises((ConnectionResetError, AssertionError)):
            assert refused.recv(1) != b""
        go_on.set()
        assert ["".join(part.choices[0].delta.content or "" for part in stream) for stream in streams] == ["first"] * 2
        assert gateway.http.get("/health/live").status_code == 200


def test_where_no_file_can_be_opened_the_log_says_so_once_in_a_while(triton: FakeTriton) -> None:
    with started(triton) as process, ExitStack() as stack:
        assert process.stdout is not None
        assert process.stderr is not None
        base = process.stdout.readline().split("=")[1].split("/v1")[0]
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (4, hard))
        host, port = base.removeprefix("http://").split(":")
        for _ in range(30):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=TIMEOUT_S))
        line = ""
        while "out of system resource" not in line:
            line = process.stderr.readline()
            assert line
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert httpx.get(f"{base}/health/live", timeout=TIMEOUT_S).status_code == 200
        process.send_signal(signal.SIGTERM)
        # A traceback of a dozen lines for each of what was thousands of failures.
        assert process.communicate(timeout=TIMEOUT_S)[1].count("Too many open files") <= 3


def logged(text: str) -> logging.LogRecord:
    return logging.LogRecord("any", logging.WARNING, "", 0, text, (), None)


def test_a_line_that_repeats_is_counted() -> None:
    now = [0.0]
    repeats = Repeats(lambda: now[0])
    assert [repeats.filter(logged("same")) for _ in range(1000)] == [True] + [False] * 999
    assert repeats.filter(logged("other"))
    now[0] = EVERY_S
    again = logged("same")
    assert repeats.filter(again)
    assert again.getMessage() == "same (999 times more in 10 s)"
    now[0] = 2 * EVERY_S
    once = logged("same")
    assert repeats.filter(once)
    assert once.getMessage() == "same"


def test_lines_of_many_texts_are_not_kept_for_ever() -> None:
    repeats = Repeats(lambda: 0.0)
    assert all(repeats.filter(logged(str(number))) for number in range(1000))
    assert len(repeats._seen) <= 64


@pytest.mark.parametrize(
    ("found", "made"),
    [((64, 4096), (1152, 4096)), ((4096, 4096), None), ((64, resource.RLIM_INFINITY), (1152, resource.RLIM_INFINITY))],
)
def test_as_many_files_may_be_open_as_there_are_connections(
    monkeypatch: pytest.MonkeyPatch, found: tuple[int, int], made: tuple[int, int] | None
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(
        connections,
        "resource",
        SimpleNamespace(
            RLIMIT_NOFILE=resource.RLIMIT_NOFILE,
            RLIM_INFINITY=resource.RLIM_INFINITY,
            getrlimit=lambda _: found,
            setrlimit=lambda _, given: limits.append(given),
        ),
    )
    allow_open_files(1024)
    assert limits == ([] if made is None else [made])


def test_more_connections_than_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    with pytest.raises(
        SettingsError, match=r"--max-connections 1024 needs 1152 open files, and the limit is 1024; raise"
    ):
        allow_open_files(1024)
