# SPDX-License-Identifier: Apache-2.0
"""A matrix product of few rows whose depth is shared out (split-K), in the Triton language.

For few rows a product is bound by its weights, and by the latency of walking along its depth. A library gives each
program a tile of the output, of which a narrow one has fewer than there are multiprocessors; here several programs
share a tile's depth, and whoever reads the product adds their parts up. Sums are in float32.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_SMALLEST_TILE = 16
"""Tensor cores multiply no smaller tiles."""
_MOST_ROWS = 64
"""Of a program."""
_ROWS = 32
"""Of a program where one cannot take all."""
_COLUMNS = 32
_STRIDE = 128
"""Columns of a program, and its depth at a time: 8 KB of weights."""
_MOST_PARTS = 16
_ENOUGH_PROGRAMS = 264
"""Two a multiprocessor of the largest GPUs."""


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """To be called before anything is read: a kernel that is launched early begins while the one before still runs."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@functools.cache
def early_launch(device: torch.device, *, wanted: bool = True) -> dict[str, Any]:
    """Arguments of a launch whose kernel is laid out on the GPU while the one before ends, where the GPU can.

    Source: programmatic dependent launch, CUDA Programming Guide; from compute capability 9.0 (Hopper) on.
    """
    if wanted and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@triton.jit
def _split_product(
    rows,
    weights,
    parts,
    count,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    part, row = tl.program_id(1), tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    wanted, inside = (row < count)[:, None], (column < WIDTH)[None, :]
    left, right = rows + row[:, None] * DEPTH, weights + column.to(tl.int64)[None, :] * DEPTH
    summed = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(part * SHARE, tl.minimum((part + 1) * SHARE, DEPTH), STRIDE):
        depth = at + tl.arange(0, STRIDE)
        known = depth < DEPTH
        ours = tl.load(left + depth[None, :], mask=wanted & known[None, :], other=0.0)
        theirs = tl.load(right + depth[:, None], mask=inside & known[:, None], other=0.0)
        summed += tl.dot(ours, theirs, input_precision="ieee")
    tl.store(parts + (part * count + row[:, None]) * WIDTH + column[None, :], summed, mask=wanted & inside)


def split_product(rows: Tensor, weights: Tensor) -> Tensor:
    """Parts [S, M, N] fp32 whose sum is `rows` [M, K] times the transpose of `weights` [N, K]; both contiguous."""
    (count, depth), width = rows.shape, len(weights)
    tile = padded_rows(count) if count <= _MOST_ROWS else _ROWS
    tiles, columns = triton.cdiv(count, tile), triton.cdiv(width, _COLUMNS)
    wanted = min(_MOST_PARTS, triton.cdiv(_ENOUGH_PROGRAMS, columns * tiles))
    share = triton.cdiv(triton.cdiv(depth, _STRIDE), wanted) * _STRIDE
    output = torch.empty(triton.cdiv(depth, share), count, width, dtype=torch.float32, device=rows.device)
    _split_product[(columns, len(output), tiles)](
        rows,
        weights,
        output,
        count,
        WIDTH=width,
        DEPTH=depth,
        SHARE=share,
        ROWS=tile,
        COLUMNS=_COLUMNS,
        STRIDE=_STRIDE,
        num_warps=4,
        num_stages=4,
        **early_launch(rows.device),
    )
    return output


def padded_rows(count: int) -> int:
    """The smallest tile that holds so many rows."""
    return max(_SMALLEST_TILE, 1 << (count - 1).bit_length())
