# SPDX-License-Identifier: Apache-2.0
"""Kernels in the Triton language that exchange a decode step's inputs and results with the host.

For a few bytes, the hand-over between a GPU's copy engines and its multiprocessors takes longer than the copy. The gap
between two steps of a talker (1250 µs) was 27 µs, and 15 µs with kernels that access pinned memory themselves. This
module knows tensors alone.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_omni.core.kernel_launch import early_launch, let_next_begin, wait_for_inputs

_TILE: Final = 512


@triton.jit(do_not_specialize=["count"])
def _fetch(
    told, target, lengths, count, WIDTH: tl.constexpr, LENGTH: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr
):
    let_next_begin(EARLY)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    # The host's data is there; the previous step may still read the target.
    values = tl.load(told + at, mask=at < count)
    wait_for_inputs(EARLY)
    tl.store(target + at, values, mask=at < count)
    tl.store(lengths + at // WIDTH, values.to(tl.int32), mask=(at < count) & (at % WIDTH == LENGTH))


def fetch(told: Tensor, target: Tensor, lengths: Tensor, column: int) -> None:
    """Copy `told` int64 [N, C], contiguous in pinned memory, to `target` [N or more, C] of the device, in stream order.
    Copy one column to `lengths` int32 [N or more].
    """
    count, width = told.numel(), told.shape[1]
    _fetch[(triton.cdiv(count, _TILE),)](
        told,
        target,
        lengths,
        count,
        WIDTH=width,
        LENGTH=column,
        TILE=_TILE,
        num_warps=4,
        **early_launch(target.device),
    )


@triton.jit(do_not_specialize=["count"])
def _copy_drawn(drawn, kept, host, count, TILE: tl.constexpr, EARLY: tl.constexpr):
    wait_for_inputs(EARLY)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    ids = tl.load(drawn + at, mask=at < count, other=0)
    tl.store(kept + at, ids, mask=at < count)
    tl.store(host + at, ids, mask=at < count)


class DrawnIds:
    """Copies the ids that steps draw, on the device and to the host.

    Args:
        most: maximum ids of a step.
        device: of the ids.
    """

    _STEPS: Final = 4
    """Number of host buffers, used in turn: more than there are steps in flight."""

    def __init__(self, most: int, device: torch.device) -> None:
        # Each line begins at an address that allows a kernel's wide writes.
        width = -(-most // 16) * 16
        self._host = torch.zeros(self._STEPS, width, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._step = 0

    def keep(self, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Copy `drawn` int32 [B] on the device, and to the host in stream order; that copy lasts `_STEPS` steps."""
        kept, self._step = torch.empty_like(drawn), (self._step + 1) % self._STEPS
        host = self._host[self._step, : len(drawn)]
        _copy_drawn[(triton.cdiv(len(drawn), _TILE),)](
            drawn, kept, host, len(drawn), TILE=_TILE, num_warps=4, **early_launch(drawn.device)
        )
        return kept, host
