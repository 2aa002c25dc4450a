# SPDX-License-Identifier: Apache-2.0
"""The early launch that kernels share which follow each other, in the Triton language."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """To be called first where a kernel reads before `wait_for_inputs` what none before it may still be writing: what a
    kernel that is not launched early stands behind, such as weights, and what was laid out for all layers.

    A load of them that came behind a sum would be waited for once more.
    """
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """To be called before all else is read: a kernel that is launched early begins while the one before still runs.

    Also before a program ends: the next kernel waits for this one alone.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


def early_launch(device: torch.device, *, early: bool = True) -> dict[str, Any]:
    """Arguments of a launch whose kernel is laid out on the GPU while the one before ends, where the GPU can.

    Not `early`, where the kernel before is a library's, which lets none begin: it would only cost.
    Source: programmatic dependent launch, CUDA Programming Guide; from compute capability 9.0 (Hopper) on.
    """
    return {"EARLY": True, "launch_pdl": True} if early and _launches_early(device) else {"EARLY": False}


@functools.cache
def _launches_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
