# SPDX-License-Identifier: Apache-2.0
"""Launches of kernels in the Triton language: sizes of tiles, and programmatic dependent launch."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_SMALLEST_TILE = 16
"""Tensor cores multiply no smaller tiles."""


def padded_rows(count: int) -> int:
    """The smallest tile that holds so many rows."""
    return max(_SMALLEST_TILE, 1 << (count - 1).bit_length())


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """Call this first in kernels that prefetch inputs no running kernel can still write, such as weights.

    A prefetch after a reduction would wait for memory once more.
    """
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Call this before reading inputs: a kernel that is launched early begins while the previous one still runs.

    Also call it before a program ends, since the next kernel waits for this one alone.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


def early_launch(device: torch.device, *, early: bool = True) -> dict[str, Any]:
    """Return launch arguments that let a kernel be set up while the previous one ends, where the GPU can.

    Pass `early=False` after a library's kernel, which never triggers an early launch. Source: programmatic dependent
    launch, CUDA Programming Guide; from compute capability 9.0 (Hopper) on.
    """
    return {"EARLY": True, "launch_pdl": True} if early and _launches_early(device) else {"EARLY": False}


@functools.cache
def _launches_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
