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

import yaml

from triton_omni.session.ledger_table import STAGES
from triton_omni.supervisor.machine import visible_gpus

from .balancer import on_loopback, run_envoy
from .server import server, wait_ready
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
def serving(variant: Variant, model: Path, folder: Path, *, mps: bool) -> Iterator[Served]:
    """The variant's servers, ready; several servers, or one with a balancer, get an Envoy before them.

    Args:
        variant: what to serve.
        model: the checkpoint.
        folder: gets logs, and what the variant changes.
        mps: whether each server runs under a CUDA MPS daemon of its own.

    Raises:
        ServerError: a server does not start, has ended by itself, or does not stop.
        BalancerError: there is no Envoy to put before them.
    """
    profile = folder / "profile.yaml"
    profile.write_text(yaml.safe_dump(dict(variant.profile.changes)), encoding="utf-8")
    options = ["--model", str(model), "--mps" if mps else "--no-mps"]
    if variant.profile.changes:
        options += ["--profile", str(profile)]
    logs = [folder / f"server-{number}.log" for number in range(variant.replicas)]
    with ExitStack() as stack:
        started = [
            stack.enter_context(server(variant.checkout, [*options, "--gpus", _gpus(variant, number)], log))
            for number, log in enumerate(logs)
        ]
        ready = [wait_ready(process, log) for process, log in zip(started, logs, strict=True)]
        url = ready[0]["grpc"]
        if variant.balancer or len(ready) > 1:
            url, _ = stack.enter_context(run_envoy(on_loopback([each["grpc"] for each in ready]), folder))
        yield Served(url, f"http://{ready[0]['metrics']}/metrics", folder)


def _gpus(variant: Variant, number: int) -> str:
    """The GPU of each stage of a server, as its option has them."""
    alone = dict.fromkeys(STAGES, number if visible_gpus(os.environ) else 0)
    return ",".join(f"{stage}={gpu}" for stage, gpu in (variant.placement or alone).items())
