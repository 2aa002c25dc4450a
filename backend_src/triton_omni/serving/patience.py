# SPDX-License-Identifier: Apache-2.0
"""Preloads `patience.c`, by which Triton outlives stages that stand still or die; its head says why."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from triton_omni.cache_folder import cache_folder
from triton_omni.serving.machine import prepend
from triton_omni.serving.native import NativeError, build_library
from triton_omni.serving.revival import RevivalPolicy

PATIENCE_S: Final = RevivalPolicy().stalled_after_s + 10.0
"""How much longer than its own second Triton waits for a stage that lives; the supervisor ends one that hangs first."""
SCRATCH_VARIABLE: Final = "OMNI_SCRATCH"
_SOURCE: Final = Path(__file__).with_suffix(".c")


def preloaded(environment: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """What to add to the environment of tritonserver; nothing, and a warning, where the library cannot be had.

    Args:
        environment: what it has.
        scratch: the folder for what its Python backend would write to /tmp.
    """
    try:
        library = build_patience(cache_folder() / "native", PATIENCE_S)
    except NativeError as error:
        print(f"warning: {error}; a stage that stands still or dies may end the server", file=sys.stderr)
        return {}
    return {"LD_PRELOAD": prepend([library], environment.get("LD_PRELOAD", "")), SCRATCH_VARIABLE: str(scratch)}


def build_patience(folder: Path, patience_s: float) -> Path:
    """The shared library for waits that go on for `patience_s` seconds.

    Raises:
        NativeError: as `build_library`.
    """
    return build_library(_SOURCE, folder, PATIENCE_MS=round(patience_s * 1000))
