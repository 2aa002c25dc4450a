# SPDX-License-Identifier: Apache-2.0
"""Preloads `bounds.c`, which bounds what callers can make of Triton's front ends; its head says what and why."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from triton_omni.cache_folder import cache_folder
from triton_omni.serving.machine import ServerError, prepend
from triton_omni.serving.native import NativeError, build_library
from triton_omni.settings import RequestLimits, SettingsError, ThinkerSettings, load_settings

_SOURCE: Final = Path(__file__).with_suffix(".c")


def bounded(environment: Mapping[str, str], repository: Path) -> dict[str, str]:
    """What to add to the environment of tritonserver; nothing, and a warning, where the library cannot be had.

    Args:
        environment: of tritonserver so far.
        repository: the models; the thinker's limits say how long a body may be.

    Raises:
        ServerError: the thinker's `stage.yaml` cannot be used.
    """
    limits = _limits(repository / "thinker" / "1" / "stage.yaml")
    try:
        library = build_bounds(cache_folder() / "native", limits.max_body_bytes)
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


def _limits(path: Path) -> RequestLimits:
    """Of a thinker; the defaults where a repository has none."""
    if not path.is_file():
        return RequestLimits()
    try:
        return load_settings(path, ThinkerSettings).limits
    except SettingsError as error:
        raise ServerError(str(error)) from error
