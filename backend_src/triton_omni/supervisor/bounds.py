# SPDX-License-Identifier: Apache-2.0
"""Preloads `bounds.c`, which bounds what callers can make of Triton's front ends; its head says what and why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from triton_omni.supervisor.native import preloading

SOURCE: Final = Path(__file__).with_suffix(".c")
_WITHOUT: Final = (
    "each caller can end the server, and each local user can read requests in /dev/shm: install a C compiler, or name "
    "it by CC"
)


def bounded(environment: Mapping[str, str], body_bytes: int) -> dict[str, str]:
    """Return the environment that `preloading` adds for HTTP bodies of at most `body_bytes`."""
    return preloading(SOURCE, environment, _WITHOUT, BODY_BYTES=body_bytes)
