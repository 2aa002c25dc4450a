# SPDX-License-Identifier: Apache-2.0
"""Configuration of one server, and the supervisor command's options for it. It starts nothing."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from triton_omni.core.arguments import Parser, port, seconds, whole_number
from triton_omni.core.logs import FORMAT_VARIABLE, FORMATS
from triton_omni.core.profile import NO_PROFILE, Profile, load_profile, named_profiles
from triton_omni.core.settings import SettingsError
from triton_omni.supervisor.restart import RestartPolicy
from triton_omni.supervisor.served_repository import parse_placement


@dataclass(frozen=True)
class ServerConfig:
    """Configuration of one server."""

    model_repository: Path
    model: str | None = None
    """Checkpoint folder or hub id; None = the repository's `training/mini`."""
    profile: Profile = NO_PROFILE
    """Settings that override those of the repository."""
    host: str = "127.0.0.1"
    """Address that the three services bind."""
    http_port: int = 0
    """0 = a free port, here and below."""
    grpc_port: int = 0
    metrics_port: int = 0
    log_path: Path | None = None
    """File of the server's output; None = this process's standard error."""
    log_verbose: int = 0
    """Triton's own verbosity."""
    ready_timeout_s: float = 900.0
    """Seconds until the server must be ready; a first start on a GPU compiles kernels and reads weights."""
    exit_timeout_s: int = 30
    """Seconds that Triton has to stop once no session is open."""
    drain_timeout_s: float = 30.0
    """Seconds that a stopping server gives open replies; 0 = none."""
    mps: bool = False
    """Share the GPUs under a CUDA MPS daemon of the server's own."""
    client_shared_memory: bool = False
    """Let clients register regions of shared memory for their inputs."""
    stall_guard: bool = True
    """Preload `stall_guard.c`, with which the server outlives a stage that stalls or dies at a bad moment."""
    warm_up: bool = True
    """Ask the server for a short reply before clients may do so."""
    placement: Mapping[str, int] = field(default_factory=lambda: parse_placement(""))
    """Number of each stage's GPU."""
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    """Restarts of stages that died."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the server and its stages."""


def parse_options(arguments: Sequence[str] | None) -> ServerConfig:
    """The command's options; a refusal ends the process with one line. The environment gives some defaults."""
    by_variable = os.environ.get("OMNI_MPS") or "0"
    command = parser(mps=by_variable == "1")
    given = command.parse_args(arguments)
    try:
        placement = parse_placement(given.gpus)
    except ValueError as error:
        command.error(f"--gpus (or OMNI_GPUS): {error}")
    try:
        profile = load_profile(given.profile) if given.profile else NO_PROFILE
    except SettingsError as error:
        command.error(f"--profile (or OMNI_PROFILE): {error}")
    if by_variable not in ("0", "1"):
        command.error(f"OMNI_MPS must be 0 or 1, not '{by_variable}'")
    return ServerConfig(
        model_repository=given.model_repository,
        model=given.model,
        profile=profile,
        host=given.host,
        http_port=given.http_port,
        grpc_port=given.grpc_port,
        metrics_port=given.metrics_port,
        log_path=given.log_file,
        log_verbose=given.log_verbose,
        ready_timeout_s=given.ready_timeout,
        exit_timeout_s=given.exit_timeout,
        drain_timeout_s=given.drain_timeout,
        mps=given.mps,
        client_shared_memory=given.client_shared_memory,
        stall_guard=given.stall_guard,
        warm_up=given.warm_up,
        placement=placement,
        environment={FORMAT_VARIABLE: given.log_format} if given.log_format else {},
    )


def parser(*, mps: bool = False) -> argparse.ArgumentParser:
    """All options of the supervisor's command; `mps` is the default of `--mps`."""
    command = Parser(prog="triton_omni.supervisor.serve", description="Serve a model repository.")
    add = command.add_argument
    add(
        "--version", action="version", version=f"triton-omni {version('triton-omni')}", help="tell the version, and end"
    )
    add(
        "--model-repository",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="the models to serve; `build.sh` gives it",
    )
    add(
        "--model",
        default=os.environ.get("OMNI_MODEL"),
        help="checkpoint folder or Hugging Face id (default: OMNI_MODEL)",
    )
    profiles = (
        f"values that go before those of `stage.yaml`: {', '.join(named_profiles())}, or a file (default: OMNI_PROFILE)"
    )
    add("--profile", default=os.environ.get("OMNI_PROFILE"), metavar="NAME|FILE", help=profiles)
    add("--host", default="127.0.0.1", help="address to bind (default: loopback only)")
    add("--http-port", type=port, default=8000, metavar="N", help="HTTP port (default 8000; 0 = a free port)")
    add("--grpc-port", type=port, default=8001, metavar="N", help="gRPC port (default 8001; 0 = a free port)")
    add(
        "--metrics-port",
        type=port,
        default=8002,
        metavar="N",
        help="port of the metrics (default 8002; 0 = a free port)",
    )
    log = "log file, in an existing folder (default: standard error)"
    add("--log-file", type=Path, metavar="FILE", help=log)
    add("--log-verbose", type=whole_number, default=0, metavar="N", help="Triton's own verbosity (default 0)")
    add("--log-format", choices=FORMATS, help="format of the stages' log records (default: OMNI_LOG_FORMAT, or plain)")
    start = "time that loading all models may take (default 900)"
    add("--ready-timeout", type=seconds, default=900.0, metavar="SECONDS", help=start)
    stop = "time that Triton gets to stop once no reply is under way (default 30)"
    add("--exit-timeout", type=whole_number, default=30, metavar="SECONDS", help=stop)
    drain = "time that replies under way get to end at a stop (default 30; 0 = none)"
    add("--drain-timeout", type=seconds, default=30.0, metavar="SECONDS", help=drain)
    shared = "let the stages share a GPU under the server's own CUDA MPS daemon (default: OMNI_MPS, or not)"
    add("--mps", action=argparse.BooleanOptionalAction, default=mps, help=shared)
    regions = "let clients register regions of shared memory for their inputs (default: not)"
    add("--client-shared-memory", action="store_true", help=regions)
    guard = (
        "preload the library by which the server outlives a stage that stands still or dies at a bad moment (default)"
    )
    add("--stall-guard", action=argparse.BooleanOptionalAction, default=True, help=guard)
    warm = "speak a short reply at the start, so that no caller waits for cold caches (default)"
    add("--warm-up", action=argparse.BooleanOptionalAction, default=True, help=warm)
    placed = "the GPU of each stage, for example thinker=0,token2wav=1 (default: OMNI_GPUS, or 0)"
    add("--gpus", default=os.environ.get("OMNI_GPUS", ""), metavar="STAGE=N,...", help=placed)
    return command
