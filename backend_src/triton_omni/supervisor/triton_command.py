# SPDX-License-Identifier: Apache-2.0
"""The command line of tritonserver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from triton_omni.supervisor.machine import TritonInstall
from triton_omni.supervisor.options import ServerConfig
from triton_omni.supervisor.triton_features import CLIENT_SHARED_MEMORY, HTTP_BODY_LIMIT


def server_command(
    config: ServerConfig,
    install: TritonInstall,
    repository: Path,
    *,
    ports: Mapping[str, int],
    control_flags: Sequence[str],
    regions: str,
    pools: Sequence[int],
    options: frozenset[str],
    body_limit: int,
) -> list[str]:
    """Program and arguments.

    Args:
        config: how the server runs.
        install: the tritonserver.
        repository: its models, laid out for this start.
        ports: of `http`, `grpc` and `metrics`.
        control_flags: what guards model control, see `ModelControl.flags`.
        regions: with what the names of its regions of shared memory begin.
        pools: bytes of each GPU's pool of memory for tensors between models; none = there is no GPU.
        options: names of the options that this tritonserver knows.
        body_limit: bytes of the largest HTTP body that the models take.
    """
    command = [
        str(install.binary),
        f"--model-repository={repository.resolve()}",
        *control_flags,
        "--strict-readiness=true",
        f"--exit-timeout-secs={config.exit_timeout_s}",
        "--allow-http=true",
        f"--http-address={config.host}",
        f"--http-port={ports['http']}",
        "--allow-grpc=true",
        f"--grpc-address={config.host}",
        f"--grpc-port={ports['grpc']}",
        # A stream that is kept for the next keeps all the bytes of its longest reply; one is as quickly made anew.
        "--grpc-infer-allocation-pool-size=0",
        "--allow-metrics=true",
        f"--metrics-address={config.host}",
        f"--metrics-port={ports['metrics']}",
        f"--log-verbose={config.log_verbose}",
        f"--backend-config=python,shm-region-prefix-name={regions}",
    ]
    if install.backend_directory is not None:
        command.append(f"--backend-directory={install.backend_directory}")
    if CLIENT_SHARED_MEMORY in options and config.client_shared_memory:
        command.append(f"--{CLIENT_SHARED_MEMORY}=true")
    if HTTP_BODY_LIMIT in options:
        command.append(f"--{HTTP_BODY_LIMIT}={body_limit}")
    if pools:
        command += [f"--cuda-memory-pool-byte-size={gpu}:{pool}" for gpu, pool in enumerate(pools)]
    else:  # both would only fail, with a warning
        command += ["--pinned-memory-pool-byte-size=0", "--allow-gpu-metrics=false"]
    return command
