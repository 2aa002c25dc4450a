# SPDX-License-Identifier: Apache-2.0
"""Media in shared memory: what the message says of them, and that the memory is given back whatever the server says."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import grpc
import pytest
from tritonclient.grpc import service_pb2

from client_fakes import FakeTriton, bytes_tensor, serve_grpc
from triton_omni_client import (
    AsyncOmniClient,
    AsyncStream,
    BadRequest,
    Media,
    OmniClient,
    OmniClientError,
    Reply,
    Request,
    Stream,
    shared_async,
    shared_media,
)
from waiting import IN_TIME_S

MEDIA = (Media("image", b"\x89png" * 1000), Media("audio", b"RIFF"))
SHARED_MEMORY = Path("/dev/shm")


def files() -> list[Path]:
    """This process's regions."""
    return list(SHARED_MEMORY.glob(f"triton_omni_client_{os.getpid()}_*"))


@dataclass
class SharingTriton(FakeTriton):
    """Keeps the contents of what is registered; `holds` it against so many calls to let go of it, or while called.

    With `holds_on` it does so until a test says otherwise.
    """

    refusal: str = ""
    holds: int = 0
    holds_while_called: bool = False
    holds_on: bool = False
    contents: dict[str, bytes] = field(default_factory=dict)
    registered: set[str] = field(default_factory=set)

    def SystemSharedMemoryRegister(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.refusal:
            context.abort(grpc.StatusCode.UNAVAILABLE, self.refusal)
        self.contents[request.name] = (SHARED_MEMORY / request.key.removeprefix("/")).read_bytes()[: request.byte_size]
        self.registered.add(request.name)
        return service_pb2.SystemSharedMemoryRegisterResponse()

    def SystemSharedMemoryUnregister(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.holds or self.holds_on or (self.holds_while_called and not self.cancelled.is_set()):
            self.holds = max(0, self.holds - 1)
            context.abort(grpc.StatusCode.INTERNAL, f"Cannot unregister '{request.name}', it is currently in use")
        self.registered.discard(request.name)
        return service_pb2.SystemSharedMemoryUnregisterResponse()


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client gives no server up that is only slow."""
    monkeypatch.setattr(shared_media, "RELEASE_SECONDS", IN_TIME_S)
    monkeypatch.setattr(shared_media, "CALL_SECONDS", IN_TIME_S)


@pytest.fixture
def triton() -> Iterator[SharingTriton]:
    with serve_grpc(SharingTriton()) as fake:
        yield fake


class Awaited:
    """The asyncio client, its loop running while it is asked something and else not."""

    def __init__(self, url: str) -> None:
        self._loop = asyncio.Runner()
        self._client = self._loop.run(self._made(url))

    async def _made(self, url: str) -> AsyncOmniClient:
        return AsyncOmniClient(url, shared_memory=True)

    def say(self, text: str, media: tuple[Media, ...] = (), **options: Any) -> Reply:
        return self._loop.run(self._client.say(text, media, **options))

    def stream(self, request: Request) -> AsyncStream:
        async def begun() -> AsyncStream:
            return self._client.stream(request)

        return self._loop.run(begun())

    def close(self) -> None:
        self._loop.run(self._client.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._loop.close()


Client = OmniClient | Awaited


@pytest.fixture(params=["blocking", "asyncio"])
def client(triton: SharingTriton, request: pytest.FixtureRequest) -> Iterator[Client]:
    with OmniClient(triton.url, shared_memory=True) if request.param == "blocking" else Awaited(triton.url) as found:
        yield found


def soon(condition: Callable[[], bool]) -> bool:
    """Return True if the condition holds before long: the asyncio client shares on threads."""
    deadline = time.monotonic() + IN_TIME_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def test_the_message_names_the_region_and_brings_all_other_tensors(triton: SharingTriton, client: Client) -> None:
    assert client.say("what?", MEDIA, seed=7).text == "Hello, sea."
    (message,) = triton.requests
    ((name, content),) = triton.contents.items()
    assert content == bytes_tensor(*(medium.data for medium in MEDIA))
    by_name = {tensor.name: tensor for tensor in message.inputs}
    assert by_name["media"].parameters["shared_memory_region"].string_param == name
    assert by_name["media"].parameters["shared_memory_byte_size"].int64_param == len(content)
    assert list(by_name["media"].shape) == [2]
    assert len(message.raw_input_contents) == len(by_name) - 1 == 2
    assert all(b"png" not in data for data in message.raw_input_contents)
    assert (triton.registered, files()) == (set(), [])


def test_a_request_without_media_registers_nothing(triton: SharingTriton, client: Client) -> None:
    client.say("hello")
    assert triton.contents == {}


def test_a_server_that_takes_no_shared_memory_is_told_and_leaves_nothing(triton: SharingTriton, client: Client) -> None:
    triton.refusal = "Unable to open shared memory region: '/triton_omni_client'"
    with pytest.raises(OmniClientError, match="Unable to open shared memory region"):
        client.say("what?", MEDIA)
    assert (triton.requests, files()) == ([], [])


@pytest.mark.parametrize(
    "said",
    [
        "This protocol is restricted, expecting header 'triton-grpc-protocol-triton-omni-control'",
        "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable.",
    ],
)
def test_a_server_that_forbids_shared_memory_is_told_with_the_cure(
    triton: SharingTriton, client: Client, said: str
) -> None:
    triton.refusal = said
    with pytest.raises(BadRequest, match="start it with --client-shared-memory, or make the client with"):
        client.say("what?", MEDIA)
    assert (triton.requests, files()) == ([], [])


def test_media_that_do_not_fit_are_refused_before_they_are_written(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=4000))
    with pytest.raises(BadRequest, match=r"media: 4012 bytes do not fit into /dev/shm"):
        client.say("what?", MEDIA)
    assert files() == []


def test_a_region_in_use_is_asked_for_until_it_is_free(triton: SharingTriton, client: Client) -> None:
    triton.holds = 3
    client.say("what?", MEDIA)
    assert (triton.holds, triton.registered) == (0, set())


def test_a_server_that_never_lets_go_is_told_of_and_no_longer_waited_for(
    triton: SharingTriton, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_media, "RELEASE_SECONDS", 0.05)
    triton.holds = 1_000_000
    assert client.say("what?", MEDIA).text == "Hello, sea."
    assert "the server still uses 4012 bytes of shared memory" in caplog.text
    assert files() == []


def close(stream: Stream | AsyncStream, client: Client) -> None:
    del client
    stream.close()


def close_client(stream: Stream | AsyncStream, client: Client) -> None:
    del stream
    client.close()


@pytest.mark.parametrize("end", [close, close_client])
def test_a_reply_that_is_given_up_leaves_nothing(
    triton: SharingTriton, client: Client, end: Callable[[Any, Client], None]
) -> None:
    stream = client.stream(Request.ask("what?", MEDIA))
    assert soon(lambda: len(files()) == len(triton.registered) == 1)
    end(stream, client)
    assert soon(lambda: not triton.registered and not files())


def test_a_reply_that_nobody_holds_any_more_leaves_nothing(triton: SharingTriton, client: Client) -> None:
    client.stream(Request.ask("what?", MEDIA))
    gc.collect()
    assert soon(lambda: len(triton.contents) == 1 and not triton.registered and not files())


def test_a_forgotten_request_is_cancelled_before_its_memory_is_asked_back(triton: SharingTriton) -> None:
    triton.script, triton.holds_while_called = triton.endless, True
    with OmniClient(triton.url, shared_memory=True) as client:
        next(client.stream(Request.ask("what?", MEDIA)))
        gc.collect()
        assert (triton.registered, files()) == (set(), [])


async def test_a_reply_that_a_task_forgets_leaves_nothing_and_keeps_no_loop_waiting(triton: SharingTriton) -> None:
    triton.script, triton.holds_on = triton.endless, True
    async with AsyncOmniClient(triton.url, shared_memory=True) as client:
        stream = client.stream(Request.ask("what?", MEDIA))
        await anext(stream)
        del stream
        gc.collect()
        await asyncio.sleep(0)
        triton.holds_on = False  # not before: a loop that waits gives the region up, which stays
        assert await asyncio.to_thread(soon, lambda: not triton.registered and not files())


async def test_a_task_that_is_cancelled_while_its_media_are_shared_leaves_nothing(
    triton: SharingTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = shared_media._filled
    begun, left = threading.Event(), threading.Event()

    def slowly(*args: Any) -> Any:
        begun.set()
        left.wait(IN_TIME_S)
        return filled(*args)

    monkeypatch.setattr(shared_media, "_filled", slowly)
    async with AsyncOmniClient(triton.url, shared_memory=True) as client:
        task = asyncio.create_task(client.say("what?", MEDIA))
        assert await asyncio.to_thread(begun.wait, IN_TIME_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        left.set()
    assert (len(triton.contents), triton.registered, files(), triton.requests) == (1, set(), [], [])


@pytest.mark.parametrize(("fault", "kept"), [(ValueError("the channel is closed"), True), (TypeError("a bug"), False)])
def test_only_what_may_go_wrong_is_kept_for_who_asks(
    monkeypatch: pytest.MonkeyPatch, fault: Exception, kept: bool
) -> None:
    """An unexpected fault stays the future's own error: asyncio complains of it where nobody asks."""

    def failing(*_: Any) -> Any:
        raise fault

    monkeypatch.setattr(shared_media, "_filled", failing)
    with ThreadPoolExecutor() as threads:
        made = threads.submit(shared_async._made, None, shared_media.Tensor("media", "BYTES", (1,), b"x"))
        assert (made.exception() is None) == kept
        assert fault in (made.exception(), None if made.exception() else made.result())
