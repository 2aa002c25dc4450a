# SPDX-License-Identifier: Apache-2.0
"""Media that a server reads from shared memory: the reply is the same, and nothing is left behind, however it ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from media_samples import audio_file, image_file
from server.probes import CRAWLING_THINKER
from server.serving import Served, wait_for
from triton_omni_client import NO_RETRY, BadRequest, Media, OmniClient, Request

MEDIA = [Media("image", image_file("png", 400, 300)), Media("audio", audio_file("wav", seconds=4.0))]
SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def sharing(server: Served) -> Iterator[OmniClient]:
    """A client of the server that shares its media."""
    with OmniClient(server.supervisor.grpc_url, timeout=60, retry=NO_RETRY, shared_memory=True) as client:
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


def test_shared_media_get_the_reply_of_media_in_the_message(server: Served, sharing: OmniClient) -> None:
    stream = sharing.stream(request("shared"))
    (region,) = files()
    assert regions(sharing) == {region}
    reply = stream.collect()
    plain = server.client.stream(request("not shared")).collect()
    assert server.records.prompt("shared") == server.records.prompt("not shared")
    assert server.records.codes("shared") == server.records.codes("not shared")
    assert reply.text == plain.text
    np.testing.assert_allclose(reply.audio, plain.audio, rtol=0, atol=1e-5)
    assert regions(sharing) == files() == set()


def test_a_request_without_media_shares_nothing(sharing: OmniClient) -> None:
    with sharing.stream(Request(text="hello", seed=1)):
        assert regions(sharing) == files() == set()


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
