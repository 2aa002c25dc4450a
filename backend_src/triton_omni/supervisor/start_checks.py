# SPDX-License-Identifier: Apache-2.0
"""Checks before a start: room in shared memory, and folders that must be writable."""

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


def write_something(folder: Path) -> None:
    """Write a file that is gone at once; raises OSError where that cannot be done."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_TRIED_BYTES))
        file.flush()
        os.fsync(file.fileno())
