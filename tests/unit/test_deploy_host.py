# SPDX-License-Identifier: Apache-2.0
"""Several servers on one host: compose.yaml and the units of systemd agree with the commands that they run."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from triton_omni.core.settings import ThinkerSettings
from triton_omni.supervisor import options as server_options
from triton_omni.supervisor import serve
from triton_omni_client.cli import app
from triton_omni_gateway.server import DEFAULT_PORT, Command, parse_command

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "deploy" / "systemd"
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SERVERS = [service for name, service in SERVICES.items() if name.startswith("server-")]


def service_of(unit: str, instance: str = "") -> dict[str, str]:
    """The section Service of a unit; of a key that is there several times, all values."""
    text = (UNITS / unit).read_text(encoding="utf-8").replace("\\\n", " ").replace("%i", instance)
    seen: dict[str, int] = {}

    def numbered(match: re.Match[str]) -> str:
        seen[match[1]] = seen.get(match[1], 0) + 1
        return match[0] if seen[match[1]] == 1 else f"{match[1]}.{seen[match[1]]}="

    parser = configparser.RawConfigParser()
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(re.sub(r"^(\w+)=", numbered, text, flags=re.MULTILINE))
    return dict(parser["Service"])


def server_unit(instance: str) -> server_options.ServerConfig:
    program, *arguments = shlex.split(service_of("triton-omni@.service", instance)["ExecStart"])
    assert program.endswith("/triton-omni-serve")
    return server_options.parse_options(arguments)


def gateway_command(arguments: list[str], tmp_path: Path) -> Command:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    return parse_command([re.sub(r"(^|=)/\S*keys$", rf"\g<1>{keys}", part) for part in arguments])


def seconds(duration: str) -> int:
    return int(duration.removesuffix("s"))


def test_instances_have_ports_and_gpus_of_their_own() -> None:
    configs = [server_unit(str(number)) for number in range(10)]
    ports = [port for config in configs for port in (config.http_port, config.grpc_port, config.metrics_port)]
    assert len(set(ports)) == 30
    assert ports[:3] == [8000, 8001, 8002]
    assert {config.host for config in configs} == {"127.0.0.1"}
    assert service_of("triton-omni@.service", "3")["Environment"] == "CUDA_VISIBLE_DEVICES=3"


def test_the_gateway_s_unit_asks_the_instances(tmp_path: Path) -> None:
    program, *arguments = shlex.split(service_of("triton-omni-gateway.service")["ExecStart"])
    assert program.endswith("/triton-omni-gateway")
    command = gateway_command(arguments, tmp_path)
    assert command.settings.triton_urls == tuple(f"127.0.0.1:{server_unit(n).grpc_port}" for n in ("0", "1"))
    assert command.host == "127.0.0.1"
    assert command.keys


def test_a_unit_waits_until_its_server_is_ready() -> None:
    unit = service_of("triton-omni@.service", "1")
    program, command, *arguments = shlex.split(unit["ExecStartPost"])
    assert program.endswith("/triton-omni")
    assert command in {found.name or found.callback.__name__ for found in app.registered_commands if found.callback}
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert given["--url"] == f"127.0.0.1:{server_unit('1').grpc_port}"
    assert float(given["--wait"]) == server_unit("1").ready_timeout_s < int(unit["TimeoutStartSec"])


def test_a_unit_is_given_the_time_that_its_stop_takes(tmp_path: Path) -> None:
    unit, config = service_of("triton-omni@.service", "0"), server_unit("0")
    assert serve.longest_stop_s(config) < int(unit["TimeoutStopSec"])
    assert config.drain_timeout_s >= ThinkerSettings().timeout_s
    gateway = service_of("triton-omni-gateway.service")
    command = gateway_command(shlex.split(gateway["ExecStart"])[1:], tmp_path)
    assert command.grace_s < int(gateway["TimeoutStopSec"])
    # Both end by SIGTERM with 143, and only the first process is told.
    assert {found["SuccessExitStatus"] for found in (unit, gateway)} == {"143"}
    assert {found["KillMode"] for found in (unit, gateway)} == {"mixed"}


@pytest.mark.parametrize("unit", ["triton-omni@.service", "triton-omni-gateway.service"])
def test_a_unit_runs_without_rights(unit: str) -> None:
    section = service_of(unit)
    assert section["User"] == "triton-omni"
    assert (section["NoNewPrivileges"], section["ProtectSystem"]) == ("yes", "strict")


def test_compose_gives_each_server_a_gpu_a_cache_and_the_name_that_envoy_asks_for() -> None:
    devices = [service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for service in SERVERS]
    assert devices == [["0"], ["1"]]
    caches = [volume for service in SERVERS for volume in service["volumes"] if volume.endswith(":/cache")]
    assert {cache.split(":")[0] for cache in caches} == COMPOSE["volumes"].keys()
    envoy = yaml.safe_load((ROOT / "deploy/envoy/envoy.yaml").read_text())["static_resources"]["clusters"][0]
    asked = envoy["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]
    for service in SERVERS:
        assert service["networks"]["inner"]["aliases"] == [asked["address"]]
        assert "ports" not in service, "Triton's ports are for nobody outside"
    assert COMPOSE["networks"]["inner"] == {"internal": True}


def test_compose_starts_what_there_is_and_waits_for_its_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMNI_API_KEYS", raising=False)
    for service in SERVERS:
        config = server_options.parse_options(["--model-repository", "x", *service["command"]])
        assert serve.longest_stop_s(config) < seconds(service["stop_grace_period"])
        assert service["environment"] == ["OMNI_PROFILE"]
    gateway = SERVICES["gateway"]
    command = gateway_command(gateway["command"], tmp_path)
    assert command.settings.triton_urls == ("envoy:8001",)
    assert gateway["ports"] == [f"127.0.0.1:{DEFAULT_PORT}:{command.port}"]
    assert command.grace_s < seconds(gateway["stop_grace_period"])


@pytest.mark.parametrize("name", SERVICES)
def test_compose_gives_no_container_rights(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    for bound in service.get("ports", []):
        assert bound.startswith("127.0.0.1:")


@pytest.mark.parametrize("name", SERVICES)
def test_no_caller_fills_the_disk_with_the_log_of_a_container(name: str) -> None:
    """Docker's default, json-file, has no limit: a flood of requests wrote a line each."""
    logging = SERVICES[name]["logging"]
    assert logging["driver"] == "local"
    assert int(logging["options"]["max-size"].removesuffix("m")) * int(logging["options"]["max-file"]) <= 100


@pytest.mark.parametrize(
    ("name", "pods"), [("gateway", "kubernetes/base/gateway.yaml"), ("envoy", "envoy/envoy-kubernetes.yaml")]
)
def test_what_callers_reach_has_as_much_memory_as_in_kubernetes(name: str, pods: str) -> None:
    documents = yaml.safe_load_all((ROOT / "deploy" / pods).read_text())
    (deployment,) = (found for found in documents if found["kind"] == "Deployment")
    limit = deployment["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"]
    assert SERVICES[name]["mem_limit"] == limit.replace("Gi", "g")
    if name == "gateway":
        assert service_of("triton-omni-gateway.service")["MemoryMax"] == limit.replace("Gi", "G")


def test_compose_and_kubernetes_run_one_envoy() -> None:
    pods = (ROOT / "deploy/envoy/envoy-kubernetes.yaml").read_text()
    assert f"image: {SERVICES['envoy']['image']}\n" in pods
