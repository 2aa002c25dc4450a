# SPDX-License-Identifier: Apache-2.0
"""Checks before a start: room in shared memory, folders that must be writable, and the share of the GPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from triton_omni.supervisor.machine import ServerError

CACHES: Final = ("XDG_CACHE_HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
"""Variables that name folders in which libraries keep what they compile."""
SHARED_MEMORY: Final = Path("/dev/shm")
LEAST_SHARED_MIB: Final = 32
"""MiB of shared memory that the ledger and Triton's regions need at the start, before any request."""
MPS_SHARE: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
"""Variable by which CUDA MPS gives a process a part of a GPU's multiprocessors."""
_TRIED_BYTES: Final = 4096


def check_shared_memory(folder: Path = SHARED_MEMORY) -> None:
    """Look whether there is room for what the stages share.

    Raises:
        ServerError: there is less than `LEAST_SHARED_MIB`, or no such folder.
    """
    try:
        found = os.statvfs(folder)
    except OSError as error:
        raise ServerError(f"{folder}, which the stages share, cannot be used ({error.strerror})") from error
    free = found.f_bavail * found.f_frsize // (1 << 20)
    if free < LEAST_SHARED_MIB:
        raise ServerError(
            f"{folder} has {free} MiB free, the stages need at least {LEAST_SHARED_MIB} "
            "(in a container: --shm-size 1g, or an emptyDir of medium Memory)"
        )


def check_caches(environment: Mapping[str, str]) -> None:
    """Look whether what is compiled can be kept where the environment says, by writing something.

    Raises:
        ServerError: it cannot; the message names variable, folder and reason.
    """
    for variable in CACHES:
        if not (folder := environment.get(variable)):
            continue
        try:
            write_something(Path(folder))
        except OSError as error:
            raise ServerError(f"{variable}: {folder} cannot be written ({error.strerror})") from error


def check_gpu_share(environment: Mapping[str, str]) -> None:
    """Look whether the stages would get a part of a GPU's multiprocessors alone.

    vLLM's own decode steps then give hidden states that are not finite. Seen with 30 and 65 % of an H100, and without
    any kernel of this project.

    Raises:
        ServerError: they would.
    """
    if (share := environment.get(MPS_SHARE, "")) not in {"", "100"}:
        raise ServerError(
            f"{MPS_SHARE} is {share}, but vLLM's hidden states are not finite on a part of a GPU: "
            "unset it, or set it to 100"
        )


def write_something(folder: Path) -> None:
    """Write a file that is gone at once; raises OSError where that cannot be done."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_TRIED_BYTES))
        file.flush()
        os.fsync(file.fileno())
