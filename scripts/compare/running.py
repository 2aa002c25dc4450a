# SPDX-License-Identifier: Apache-2.0
"""Serves a variant, and loads it with `triton-omni bench` or judges it with `triton-omni evaluate`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from triton_omni.session.ledger_table import STAGES
from triton_omni.supervisor.machine import visible_gpus
from triton_omni.supervisor.options import ServerConfig
from triton_omni.supervisor.serve import Supervisor

from .balancer import on_loopback, run_envoy
from .variants import Load, Variant

Program = Literal["bench", "evaluate"]


class MeasureFailed(RuntimeError):
    """`triton-omni bench` or `evaluate` ended with an error; it has told why."""


@dataclass(frozen=True)
class Served:
    """Where the servers of a variant are asked."""

    grpc_url: str
    metrics_url: str
    """Metrics URL of the first server."""
    folder: Path
    """Folder of their logs."""


def measure(served: Served, load: Load) -> Any:
    """Load servers, and write what `triton-omni bench` reports, with its plots beside it; the report's JSON.

    Raises:
        MeasureFailed: the load could not be measured.
    """
    report = served.folder / f"{load.name}.json"
    return _run("bench", served, ["--metrics-url", served.metrics_url, "-o", str(report), *load.options], report)


def judge(served: Served, load: Load, reference: Path | None) -> Any:
    """Judge servers' replies, and write what `triton-omni evaluate` reports; the report's JSON.

    Args:
        served: the servers.
        load: options, and the name of the folder of the report.
        reference: folder of such a report to compare with; None = this one is the first.

    Raises:
        MeasureFailed: the replies could not be judged.
    """
    folder = served.folder / load.name
    against = [] if reference is None else ["--reference", str(reference)]
    return _run("evaluate", served, ["-o", str(folder), *against, *load.options], folder / "evaluate.json")


def _run(program: Program, served: Served, options: Sequence[str], report: Path) -> Any:
    command = [sys.executable, "-m", "triton_omni_client", program, "--url", served.grpc_url, *options]
    if code := subprocess.run(command, check=False).returncode:
        raise MeasureFailed(f"triton-omni {program} ended with {code}")
    return json.loads(report.read_text(encoding="utf-8"))


@contextmanager
def serving(variant: Variant, repository: Path, model: Path, folder: Path, *, mps: bool) -> Iterator[Served]:
    """The variant's servers, ready; several servers, or one with a balancer, get an Envoy before them.

    Args:
        variant: what to serve.
        repository: models that the variant changes.
        model: the checkpoint.
        folder: gets logs.
        mps: whether each server runs under a CUDA MPS daemon of its own.

    Raises:
        ServerError: a server does not start.
        BalancerError: there is no Envoy to put before them.
    """
    with ExitStack() as stack:
        servers, gpus = [], visible_gpus(os.environ)
        for number in range(variant.replicas):
            config = ServerConfig(
                repository,
                model=str(model),
                profile=variant.profile,
                log_path=folder / f"server-{number}.log",
                mps=mps,
                placement=variant.placement or dict.fromkeys(STAGES, number if gpus else 0),
            )
            server = Supervisor(config)
            stack.callback(server.stop)
            server.start()
            servers.append(server)
        for server in servers:
            server.wait_ready()
        url = servers[0].grpc_url
        if variant.balancer or len(servers) > 1:
            url, _ = stack.enter_context(run_envoy(on_loopback([server.grpc_url for server in servers]), folder))
        yield Served(url, f"http://{servers[0].metrics_url}/metrics", folder)
