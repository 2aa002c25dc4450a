# SPDX-License-Identifier: Apache-2.0
"""Preloads `stall_guard.c`, by which Triton outlives stages that stand still or die; its head says why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from triton_omni.supervisor.native import preloading
from triton_omni.supervisor.restart import RestartPolicy

STALL_GUARD_S: Final = RestartPolicy().stalled_after_s + 10.0
"""How much longer than its own second Triton waits for a stage that lives; the supervisor ends one that hangs first."""
SCRATCH_VARIABLE: Final = "OMNI_SCRATCH"
SOURCE: Final = Path(__file__).with_suffix(".c")


def preloaded(environment: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """Return the environment that `preloading` adds, and `scratch`, the folder for the Python backend's files in
    /tmp.
    """
    without = "a stage that stands still or dies may end the server"
    added = preloading(SOURCE, environment, without, PATIENCE_MS=round(STALL_GUARD_S * 1000))
    return added and {**added, SCRATCH_VARIABLE: str(scratch)}
