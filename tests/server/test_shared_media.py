# SPDX-License-Identifier: Apache-2.0
"""Media that a server reads from shared memory: the reply is the same, and nothing is left, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2

from media_samples import audio_file, image_file
from server.probes import CRAWLING_THINKER
from server.serving import REPLY_S, Served, wait_for
from server.test_bounds import refuse_foreign_files
from triton_omni_client import NO_RETRY, AsyncOmniClient, BadRequest, Media, OmniClient, Reply, Request

MEDIA = [Media("image", image_file("png", 400, 300)), Media("audio", audio_file("wav", seconds=4.0))]
SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def sharing(server: Served) -> Iterator[OmniClient]:
    """A client of the server that shares its media."""
    with OmniClient(server.supervisor.grpc_url, timeout=REPLY_S, retry=NO_RETRY, shared_memory=True) as client:
        yield client


@pytest_asyncio.fixture
async def sharing_loop(server: Served) -> AsyncIterator[AsyncOmniClient]:
    """The same for asyncio."""
    url = server.supervisor.grpc_url
    async with AsyncOmniClient(url, timeout=REPLY_S, retry=NO_RETRY, shared_memory=True) as client:
        yield client


def regions(client: OmniClient) -> set[str]:
    """Regions that the server has registered."""
    return set(client._stub.SystemSharedMemoryStatus(service_pb2.SystemSharedMemoryStatusRequest()).regions)


def files() -> set[str]:
    """This process's regions."""
    return {path.name for path in SHARED_MEMORY.glob(f"triton_omni_client_{os.getpid()}_*")}


def request(request_id: str, **options: object) -> Request:
    return Request.ask(
        "what is this?", MEDIA, request_id=request_id, **{"seed": 71, "talker": {"temperature": 0}} | options
    )


def nothing_is_left(server: Served) -> bool:
    return not regions(server.client) and not files()


def check_reply(server: Served, request_id: str, reply: Reply) -> None:
    """The reply is that to media in the message."""
    plain = server.client.stream(request(f"not {request_id}")).collect()
    assert server.records.prompt(request_id) == server.records.prompt(f"not {request_id}")
    assert server.records.codes(request_id) == server.records.codes(f"not {request_id}")
    assert reply.text == plain.text
    np.testing.assert_allclose(reply.audio, plain.audio, rtol=0, atol=1e-5)


def test_shared_media_get_the_reply_of_media_in_the_message(server: Served, sharing: OmniClient) -> None:
    stream = sharing.stream(request("shared"))
    (region,) = files()
    assert regions(sharing) == {region}
    reply = stream.collect()
    assert regions(sharing) == files() == set()
    check_reply(server, "shared", reply)


async def test_media_shared_by_a_task_get_the_same_reply(server: Served, sharing_loop: AsyncOmniClient) -> None:
    async with sharing_loop.stream(request("shared by a task")) as stream:
        await anext(stream)
        (region,) = files()
        assert regions(server.client) == {region}
        reply = await stream.collect()
    assert regions(server.client) == files() == set()
    check_reply(server, "shared by a task", reply)


async def test_a_task_that_is_cancelled_leaves_nothing(server: Served, sharing_loop: AsyncOmniClient) -> None:
    stream = sharing_loop.stream(request("shared, its task cancelled", seed=CRAWLING_THINKER))
    await anext(stream)
    assert len(files()) == 1
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.collect(), 0.2)
    await asyncio.to_thread(wait_for, lambda: nothing_is_left(server), files)
    server.wait_until_idle()


async def test_a_refused_request_of_a_task_leaves_nothing(server: Served, sharing_loop: AsyncOmniClient) -> None:
    with pytest.raises(BadRequest):
        await sharing_loop.say("what is this?", [Media("image", b"no picture" * 1000)])
    await asyncio.to_thread(wait_for, lambda: nothing_is_left(server), files)


def test_a_request_without_media_shares_nothing(sharing: OmniClient) -> None:
    with sharing.stream(Request(text="hello", seed=1)):
        assert regions(sharing) == files() == set()


def test_a_forgotten_request_leaves_nothing(
    server: Served, sharing: OmniClient, caplog: pytest.LogCaptureFixture
) -> None:
    stream = sharing.stream(request("shared, forgotten", seed=CRAWLING_THINKER))
    next(stream)
    del stream
    gc.collect()
    assert regions(sharing) == files() == set()
    assert "still uses" not in caplog.text
    server.wait_until_idle()


async def test_a_request_that_a_task_forgets_leaves_nothing(server: Served, sharing_loop: AsyncOmniClient) -> None:
    stream = sharing_loop.stream(request("shared, forgotten by a task", seed=CRAWLING_THINKER))
    await anext(stream)
    del stream
    gc.collect()
    await asyncio.to_thread(wait_for, lambda: nothing_is_left(server), files)
    server.wait_until_idle()


@pytest.mark.parametrize("after", [0, 1])
def test_a_cancelled_request_leaves_nothing(server: Served, sharing: OmniClient, after: int) -> None:
    with sharing.stream(request(f"shared, cancelled after {after}", seed=CRAWLING_THINKER)) as stream:
        for _ in range(after):
            next(stream)
        assert len(files()) == 1
    assert regions(sharing) == files() == set()
    server.wait_until_idle()


def test_a_refused_request_leaves_nothing(sharing: OmniClient) -> None:
    with pytest.raises(BadRequest):
        sharing.say("what is this?", [Media("image", b"no picture" * 1000)])
    assert regions(sharing) == files() == set()


def test_a_client_that_is_closed_leaves_nothing(server: Served) -> None:
    client = OmniClient(server.supervisor.grpc_url, shared_memory=True)
    streams = [client.stream(request(f"shared, closed {number}", seed=CRAWLING_THINKER)) for number in range(2)]
    assert len(files()) == len(streams)
    client.close()
    assert files() == set()
    wait_for(lambda: not regions(server.client), lambda: regions(server.client))


def test_a_client_registers_no_file_of_the_server(server: Served) -> None:
    refuse_foreign_files(server)
    assert server.ask("after", "hello", seed=1).info is not None


@contextmanager
def shared_file(size: int) -> Iterator[str]:
    """The key of a file of this size, which a client may share."""
    name = f"triton_omni_client_{os.getpid()}_{size}"
    path = SHARED_MEMORY / name
    path.write_bytes(bytes(size))
    try:
        yield f"/{name}"
    finally:
        path.unlink()


def register(server: Served, name: str, key: str, size: int, offset: int = 0) -> str:
    """Register a region; return the server's error, empty if there is none."""
    asked = service_pb2.SystemSharedMemoryRegisterRequest(name=name, key=key, offset=offset, byte_size=size)
    try:
        server.client._stub.SystemSharedMemoryRegister(asked)
    except grpc.RpcError as error:
        return str(error.details())
    return ""


@pytest.mark.parametrize(("size", "offset"), [(4096, 0), (16, 0), (4096, 2**64 - 4096), (0, 0)])
def test_a_file_that_is_registered_twice_closes_no_connection(server: Served, size: int, offset: int) -> None:
    """Triton keeps the number of a closed file, which a connection may have by then."""
    with shared_file(4096) as key, ExitStack() as stack:
        assert register(server, "once", key, 4096) == ""
        url = server.supervisor.http_url
        others = [
            stack.enter_context(contextlib.closing(http.client.HTTPConnection(url, timeout=REPLY_S))) for _ in range(8)
        ]
        assert [is_live(other) for other in others] == [True] * 8
        try:
            assert register(server, "twice", key, size, offset) == f"Invalid shared memory region: '{key}'"
            assert [is_live(other) for other in others] == [True] * 8
        finally:
            server.client._stub.SystemSharedMemoryUnregister(service_pb2.SystemSharedMemoryUnregisterRequest())
        assert register(server, "after", key, 4096) == ""
        server.client._stub.SystemSharedMemoryUnregister(service_pb2.SystemSharedMemoryUnregisterRequest())


def is_live(connection: http.client.HTTPConnection) -> bool:
    """Return True if the server answers on this connection, which is opened if need be."""
    opened = connection.sock
    connection.request("GET", "/v2/health/live")
    answer = connection.getresponse()
    answer.read()
    return answer.status == 200 and opened in (None, connection.sock)


@pytest.mark.parametrize("size", [4097, 2**40, 2**64 - 1])
def test_regions_larger_than_their_files_leave_no_file_open(server: Served, size: int) -> None:
    opened = Path(f"/proc/{server.supervisor.pid}/fd")
    with shared_file(4096) as key:
        before = len(list(opened.iterdir()))
        for number in range(200):
            assert "invalid args" in register(server, f"large {number}", key, size)
        assert len(list(opened.iterdir())) < before + 100, "at most one for each of gRPC's threads"
