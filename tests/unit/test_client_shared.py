# SPDX-License-Identifier: Apache-2.0
"""Media in shared memory: what the message says of them, and that the memory is given back whatever the server says."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from client_fakes import FakeTriton, bytes_tensor, serve_grpc
from triton_omni_client import BadRequest, Media, OmniClient, OmniClientError, Request, shared_media

MEDIA = (Media("image", b"\x89png" * 1000), Media("audio", b"RIFF"))
SHARED_MEMORY = Path("/dev/shm")


def files() -> list[Path]:
    """This process's regions."""
    return list(SHARED_MEMORY.glob(f"triton_omni_client_{os.getpid()}_*"))


@dataclass
class SharingTriton(FakeTriton):
    """Keeps the contents of what is registered; `holds` it against so many calls to let go of it."""

    refusal: str = ""
    holds: int = 0
    contents: dict[str, bytes] = field(default_factory=dict)
    registered: set[str] = field(default_factory=set)

    def SystemSharedMemoryRegister(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.refusal:
            context.abort(grpc.StatusCode.UNAVAILABLE, self.refusal)
        self.contents[request.name] = (SHARED_MEMORY / request.key.removeprefix("/")).read_bytes()[: request.byte_size]
        self.registered.add(request.name)
        return service_pb2.SystemSharedMemoryRegisterResponse()

    def SystemSharedMemoryUnregister(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.holds:
            self.holds -= 1
            context.abort(grpc.StatusCode.INTERNAL, f"Cannot unregister '{request.name}', it is currently in use")
        self.registered.discard(request.name)
        return service_pb2.SystemSharedMemoryUnregisterResponse()


@pytest.fixture
def triton() -> Iterator[SharingTriton]:
    with serve_grpc(SharingTriton()) as fake:
        yield fake


@pytest.fixture
def client(triton: SharingTriton) -> Iterator[OmniClient]:
    with OmniClient(triton.url, shared_memory=True) as found:
        yield found


def test_the_message_names_the_region_and_brings_all_other_tensors(triton: SharingTriton, client: OmniClient) -> None:
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


def test_a_request_without_media_registers_nothing(triton: SharingTriton, client: OmniClient) -> None:
    client.say("hello")
    assert triton.contents == {}


def test_a_server_that_takes_no_shared_memory_is_told_and_leaves_nothing(
    triton: SharingTriton, client: OmniClient
) -> None:
    triton.refusal = "Unable to open shared memory region: '/triton_omni_client'"
    with pytest.raises(OmniClientError, match="Unable to open shared memory region"):
        client.say("what?", MEDIA)
    assert (triton.requests, files()) == ([], [])


def test_media_that_do_not_fit_are_refused_before_they_are_written(
    client: OmniClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=4000))
    with pytest.raises(BadRequest, match=r"media: 4012 bytes do not fit into /dev/shm"):
        client.say("what?", MEDIA)
    assert files() == []


def test_a_region_in_use_is_asked_for_until_it_is_free(triton: SharingTriton, client: OmniClient) -> None:
    triton.holds = 3
    client.say("what?", MEDIA)
    assert (triton.holds, triton.registered) == (0, set())


def test_a_server_that_never_lets_go_is_told_of_and_no_longer_waited_for(
    triton: SharingTriton, client: OmniClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_media, "RELEASE_SECONDS", 0.05)
    triton.holds = 1_000_000
    assert client.say("what?", MEDIA).text == "Hello, sea."
    assert "the server still uses 4012 bytes of shared memory" in caplog.text
    assert files() == []


def close(stream: Any, client: OmniClient) -> None:
    del client
    stream.close()


def close_client(stream: Any, client: OmniClient) -> None:
    del stream
    client.close()


@pytest.mark.parametrize("end", [close, close_client])
def test_a_reply_that_is_given_up_leaves_nothing(
    triton: SharingTriton, client: OmniClient, end: Callable[[Any, OmniClient], None]
) -> None:
    stream = client.stream(Request.ask("what?", MEDIA))
    assert len(files()) == len(triton.registered) == 1
    end(stream, client)
    assert (triton.registered, files()) == (set(), [])


def test_a_reply_that_nobody_holds_any_more_leaves_nothing(triton: SharingTriton, client: OmniClient) -> None:
    client.stream(Request.ask("what?", MEDIA))
    gc.collect()
    assert (triton.registered, files()) == (set(), [])
