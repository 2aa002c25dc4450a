# SPDX-License-Identifier: Apache-2.0
"""Two servers on one host: each alone, through Envoy with the shipped configuration, and through a gateway.

The token2wav of one of them is `deterministic`: a reply's samples are the same to the bit, alone and among others.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import openai
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gateway_fakes import MODEL, RunningGateway, run_gateway
from server.asking import DIFFERENT, ask, ask_together, request
from server.probes import CRAWLING_THINKER, SLOW_TALKER
from server.serving import REPLY_S, TINY, Served, serve, wait_for
from triton_omni.session import server_folder
from triton_omni_client import NO_RETRY, OmniClient, Request

ROOT = Path(__file__).parents[2]
RENEWED_S = 2
"""Seconds that a client's connection to the test's Envoy lives; a minute as shipped."""
DETERMINISTIC = {**TINY, "token2wav": {**TINY["token2wav"], "deterministic": True}}
LONG, LONGER = ({"min_tokens": tokens} for tokens in (100, 250))
"""Tokens or codes that take a slow stage at least 4 and 10 seconds."""
HELLO: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "seed": 71}


@pytest.fixture(scope="module")
def servers(
    shared_server: Served, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Served]]:
    """The shared server, and one more that a test may kill."""
    with serve(tmp_path_factory.mktemp("replica"), tiny_checkpoint, DETERMINISTIC) as second:
        yield [shared_server, second]


@pytest.fixture
def deterministic(servers: list[Served]) -> Iterator[Served]:
    """The second server, idle again after the test."""
    yield servers[1]
    servers[1].wait_until_idle()


@pytest.fixture(scope="module")
def balancer() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        yield importlib.import_module("compare.balancer")


@pytest.fixture(scope="module")
def configuration(balancer: Any, servers: list[Served]) -> dict[str, Any]:
    """Envoy's: the shipped one, of which the test has shortened how long a connection lives."""
    found: dict[str, Any] = balancer.on_loopback([server.supervisor.grpc_url for server in servers])
    manager = found["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["common_http_protocol_options"]["max_connection_duration"] = f"{RENEWED_S}s"
    return found


@pytest.fixture(scope="module")
def front(
    balancer: Any, configuration: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """The addresses of Envoy's two listeners."""
    with balancer.run_envoy(configuration, tmp_path_factory.mktemp("envoy")) as urls:
        yield urls


@pytest.fixture(scope="module")
def admin(configuration: dict[str, Any]) -> int:
    """The port of Envoy's admin interface."""
    return int(configuration["admin"]["address"]["socket_address"]["port_value"])


def open_sessions(servers: list[Served]) -> list[int]:
    return [int(server.metrics("omni_sessions").get('omni_sessions{stage="thinker"}', 0)) for server in servers]


def test_servers_of_one_host_share_nothing(servers: list[Served]) -> None:
    tables = [server_folder.table_path(server_folder.ledger_name(server.supervisor.pid)) for server in servers]
    assert len(set(tables)) == 2
    assert all(table.exists() for table in tables)
    assert len({server.supervisor.regions for server in servers}) == 2
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(
            lambda server: server.ask("twin", "hello", seed=71, talker={"temperature": 0}), servers
        )
    assert first.text == second.text
    np.testing.assert_allclose(first.audio, second.audio, rtol=0, atol=1e-5)
    assert [server.records.codes("twin") == servers[0].records.codes("twin") for server in servers] == [True, True]


def test_eight_different_requests_at_once_get_the_bits_that_each_gets_alone(deterministic: Served) -> None:
    alone = {name: ask(deterministic, f"alone: {name}", **options) for name, options in DIFFERENT.items()}
    asked = {name: request(f"together: {name}", **options) for name, options in DIFFERENT.items()}
    together = ask_together(deterministic, asked)
    for name, reply in alone.items():
        assert together[name].text == reply.text
        assert deterministic.records.codes(f"together: {name}") == deterministic.records.codes(f"alone: {name}")
        assert len(reply.audio) > 0
        np.testing.assert_array_equal(together[name].audio, reply.audio)


def test_a_reply_asked_for_twice_has_the_same_bits(deterministic: Served) -> None:
    one, two = (ask(deterministic, f"twice: {number}", text="hello", seed=5, audio_format="pcm16") for number in (1, 2))
    assert one.text == two.text
    np.testing.assert_array_equal(one.audio, two.audio)


def test_envoy_spreads_the_streams_of_one_client(servers: list[Served], front: tuple[str, str], admin: int) -> None:
    streams = []
    with OmniClient(front[0], timeout=REPLY_S, retry=NO_RETRY) as client:
        for count in range(1, 7):
            streams.append(client.stream(Request(text="hello", seed=CRAWLING_THINKER, thinker=LONGER)))
            wait_for_streams(admin, count)
        assert list(of_envoy(admin, "rq_active").values()) == [3, 3]
        for stream in streams:
            stream.close()
    for server in servers:
        server.wait_until_idle()


def test_envoy_renews_connections_without_cutting_a_stream(servers: list[Served], front: tuple[str, str]) -> None:
    with OmniClient(front[0], timeout=REPLY_S, retry=NO_RETRY) as client:
        begin = time.monotonic()
        reply = client.stream(Request(text="hello", seed=SLOW_TALKER, talker=LONG)).collect()
        assert time.monotonic() - begin > RENEWED_S, "the reply is too short to tell"
        assert reply.info is not None
        assert client.say("x", seed=1).info is not None
    stats = httpx.get(f"{front[1]}/stats/prometheus").text
    assert 'envoy_http_downstream_cx_max_duration_reached{envoy_http_conn_manager_prefix="grpc"} 0' not in stats
    for server in servers:
        server.wait_until_idle()


def test_envoy_lets_clients_calls_through_and_no_others(front: tuple[str, str]) -> None:
    with grpc.insecure_channel(front[0]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ServerReady(service_pb2.ServerReadyRequest()).ready
        assert stub.ModelConfig(service_pb2.ModelConfigRequest(name=MODEL)).config.name == MODEL
        for call, request in (
            (stub.RepositoryIndex, service_pb2.RepositoryIndexRequest()),
            (stub.SystemSharedMemoryStatus, service_pb2.SystemSharedMemoryStatusRequest()),
            (stub.ModelStatistics, service_pb2.ModelStatisticsRequest()),
            (stub.LogSettings, service_pb2.LogSettingsRequest()),
            (stub.TraceSetting, service_pb2.TraceSettingRequest()),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call(request)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert httpx.get(f"{front[1]}/quitquitquit").status_code == 404


def test_of_what_a_dead_server_had_nothing_else_is_lost(
    servers: list[Served], front: tuple[str, str], admin: int
) -> None:
    """The last test of this module: one server is killed, with what it was doing."""
    living, dying = servers
    urls = [server.supervisor.grpc_url for server in servers]
    # Six at once: the one that lives has eight sessions, and one may outlast its reply by a moment.
    with run_gateway(*urls) as gateway, run_gateway(front[0]) as behind_envoy, ThreadPoolExecutor(6) as pool:
        gateway.wait_for_metric("omni_gateway_servers_ready", 2)
        # With a stream of Envoy's on the one that lives, the dead one is the one that it would rather ask.
        running = []
        for count in (1, 2):
            running.append(pool.submit(spoken, behind_envoy))
            wait_for_streams(admin, count)
        running += [pool.submit(spoken, gateway) for _ in range(2)]
        wait_for(lambda: open_sessions(servers) == [2, 2], lambda: open_sessions(servers))
        os.kill(dying.supervisor.pid, signal.SIGKILL)
        after = [pool.submit(read, gateway) for _ in range(6)]
        # Envoy repeats a request that reached no server. A request that had reached the dying server is not answered:
        # that server keeps its connections until its memory is released.
        wait_for(lambda: dying.supervisor.exit_code is not None, lambda: dying.supervisor.pid)
        wait_for(lambda: of_envoy(admin, "cx_active")[urls[1]] == 0, lambda: of_envoy(admin, "cx_active"))
        after += [pool.submit(read, behind_envoy) for _ in range(6)]
        # Requests of the dead server are lost, but one without any answer yet is asked again.
        outcomes = [outcome(future) for future in running]
        assert outcomes.count("whole") >= 2
        assert "empty" not in outcomes
        assert [outcome(future) for future in after] == ["whole"] * 12
        gateway.wait_for_metric("omni_gateway_servers_ready", 1)
        assert read(gateway) == read(behind_envoy)
    living.wait_until_idle()


def spoken(gateway: RunningGateway) -> str:
    """A reply that takes some seconds."""
    chat = {
        **HELLO,
        "seed": SLOW_TALKER,
        "extra_body": {"talker": LONGER},
        "modalities": ["text", "audio"],
        "audio": {"voice": "Chelsie", "format": "wav"},
    }
    return str(gateway.openai.chat.completions.create(**chat).choices[0].message.audio.transcript)


def read(gateway: RunningGateway) -> str:
    return str(gateway.openai.chat.completions.create(**HELLO).choices[0].message.content)


def outcome(future: Future[str]) -> str:
    """`whole`, `empty`, or why it failed."""
    try:
        return "whole" if future.result() else "empty"
    except openai.APIStatusError as error:
        return str(error)


def of_envoy(admin: int, name: str) -> dict[str, int]:
    """One of Envoy's figures of each server: `cx_active` open connections, `rq_active` requests under way."""
    clusters = httpx.get(f"http://127.0.0.1:{admin}/clusters?format=json").json()["cluster_statuses"]
    hosts = next(cluster["host_statuses"] for cluster in clusters if cluster["name"] == "triton")
    return {address(host): figure(host, name) for host in hosts}


def wait_for_streams(admin: int, count: int) -> None:
    """Envoy counts a stream once it has a connection to a server: streams that wait for one together go together."""
    wait_for(lambda: sum(of_envoy(admin, "rq_active").values()) == count, lambda: of_envoy(admin, "rq_active"))


def address(host: dict[str, Any]) -> str:
    found = host["address"]["socket_address"]
    return f"{found['address']}:{found['port_value']}"


def figure(host: dict[str, Any], name: str) -> int:
    """Envoy leaves out a value of 0."""
    return next(int(stat.get("value", 0)) for stat in host["stats"] if stat["name"] == name)
