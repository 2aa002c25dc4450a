# SPDX-License-Identifier: Apache-2.0
"""Preloads `bounds.c`, which bounds what callers can make of Triton's front ends; its head says what and why."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from triton_omni.cache_folder import cache_folder
from triton_omni.serving.machine import prepend
from triton_omni.serving.native import NativeError, build_library

_SOURCE: Final = Path(__file__).with_suffix(".c")


def bounded(environment: Mapping[str, str], body_bytes: int) -> dict[str, str]:
    """What to add to the environment of tritonserver; nothing, and a warning, where the library cannot be had.

    Args:
        environment: of tritonserver so far.
        body_bytes: length of the largest HTTP body.
    """
    try:
        library = build_bounds(cache_folder() / "native", body_bytes)
    except NativeError as error:
        print(
            f"warning: {error}; each caller can end the server, and each local user can read requests in /dev/shm: "
            "install a C compiler, or name it by CC",
            file=sys.stderr,
        )
        return {}
    return {"LD_PRELOAD": prepend([library], environment.get("LD_PRELOAD", ""))}


def build_bounds(folder: Path, body_bytes: int) -> Path:
    """The shared library for HTTP bodies of at most `body_bytes`.

    Raises:
        NativeError: as `build_library`.
    """
    return build_library(_SOURCE, folder, BODY_BYTES=body_bytes)
