# SPDX-License-Identifier: Apache-2.0
"""What kernels in the Triton language share: an early launch, and the size of a tile."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_SMALLEST_TILE = 16
"""Tensor cores multiply no smaller tiles."""


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """To be called before anything is read: a kernel that is launched early begins while the one before still runs."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@functools.cache
def early_launch(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch whose kernel is laid out on the GPU while the one before ends, where the GPU can.

    Source: programmatic dependent launch, CUDA Programming Guide; from compute capability 9.0 (Hopper) on.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


def padded_rows(count: int) -> int:
    """The smallest tile that holds so many rows."""
    return max(_SMALLEST_TILE, 1 << (count - 1).bit_length())
