# SPDX-License-Identifier: Apache-2.0
"""A DiT layer's matrix products for few rows, in the Triton language; like `kernels.py`, of which they share the rules.

Of a window alone a layer is bound by its launches and by what each waits for, not by arithmetic. So each kernel is laid
out on the GPU while the one before ends, and a product with fewer tiles than there are multiprocessors shares out its
depth, whose parts the next norm adds up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_omni.core.kernel_launch import early_launch, let_next_begin, wait_for_inputs

SHARED_BYTES = 227 << 10
"""Shared memory of a program, which the tilings below take most of; Hopper's and the datacentre's Blackwell have it."""


_ROWS = 64
"""Of a program: as many as Hopper's tensor cores take at once."""


class Tiling(NamedTuple):
    """What a program takes of a product at a time."""

    columns: int
    stride: int
    """Of the depth."""
    stages: int
    """Tiles on their way, one more than are waited for."""
    parts: int = 1
    """Programs that share the depth of a tile."""


@dataclass(frozen=True)
class LayerTilings:
    """How the products of a layer are shared out; None = a library does."""

    qkv: Tiling | None
    out: Tiling | None
    enter: Tiling | None
    leave: Tiling | None


LIBRARY = LayerTilings(None, None, None, None)
_TILINGS = {
    64: LayerTilings(Tiling(32, 128, 5), Tiling(32, 128, 5, 4), Tiling(32, 128, 6), Tiling(32, 128, 5, 4)),
    128: LayerTilings(Tiling(64, 128, 5), Tiling(64, 128, 5, 4), Tiling(32, 128, 5), Tiling(64, 128, 5, 4)),
    256: LayerTilings(Tiling(128, 64, 5), Tiling(64, 128, 5, 2), Tiling(64, 128, 5), Tiling(64, 128, 5, 2)),
    512: LayerTilings(None, Tiling(64, 128, 5), None, Tiling(64, 128, 5)),
}
"""By the most rows for which they are the fastest of those tried on an H200, a layer being as wide as published."""


def tilings_for(rows: int) -> LayerTilings:
    """How a layer of so many rows is computed."""
    return next((tilings for most, tilings in _TILINGS.items() if rows <= most), LIBRARY)


def fit(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the tilings fit: into a GPU with so much shared memory, in half precision; the interpreter has any."""
    if device.type != "cuda":
        return True
    properties: Any = torch.cuda.get_device_properties(device)
    return dtype.itemsize == 2 and properties.shared_memory_per_block_optin >= SHARED_BYTES


@triton.jit
def _product(
    rows,
    weights,
    biases,
    output,
    count,
    WIDTH: tl.constexpr,
    SHARE: tl.constexpr,
    GELU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    first_column, first_row, part = tl.program_id(0) * COLUMNS, tl.program_id(1) * ROWS, tl.program_id(2)
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    known = tl.where(part == 0, WIDTH, 0)
    bias = tl.load(biases + column, mask=column < known, other=0.0).to(tl.float32)

    wait_for_inputs(EARLY)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(SHARE // STRIDE):
        # What lies behind the depth, or the rows, is zero.
        at = part * SHARE + step * STRIDE
        ours, theirs = rows.load([first_row, at]), weights.load([first_column, at])
        total = tl.dot(ours, theirs.T, total, input_precision="ieee")
    total += bias[None, :]
    if GELU:
        # tanh(x) = 2 sigmoid(2 x) - 1, and 2 sqrt(2 / pi) of what it is taken of.
        total *= tl.sigmoid(1.5957691216057308 * (total + 0.044715 * total * total * total))
    places = output + (part * count + row[:, None]) * WIDTH + column[None, :]
    tl.store(places, total.to(output.dtype.element_ty), mask=(row < count)[:, None] & (column < WIDTH)[None, :])


def product(rows: Tensor, weights: Tensor, biases: Tensor, tiling: Tiling, *, gelu: bool = False) -> Tensor:
    """`rows` [R, K] times the transpose of `weights` [N, K], plus `biases` [N].

    Args:
        tiling: how it is shared out.
        gelu: under a GELU of the tanh form; of one part alone.

    Returns:
        [R, N] in the dtype of `rows`, or of several parts [S, R, N] fp32, whose sum it is.
    """
    (count, depth), width, parts = rows.shape, len(weights), tiling.parts
    shape, dtype = ((count, width), rows.dtype) if parts == 1 else ((parts, count, width), torch.float32)
    output = torch.empty(shape, dtype=dtype, device=rows.device)
    _product[(triton.cdiv(width, tiling.columns), triton.cdiv(count, _ROWS), parts)](
        TensorDescriptor.from_tensor(rows, [_ROWS, tiling.stride]),
        TensorDescriptor.from_tensor(weights, [tiling.columns, tiling.stride]),
        biases,
        output,
        count,
        WIDTH=width,
        SHARE=triton.cdiv(triton.cdiv(depth, tiling.stride), parts) * tiling.stride,
        GELU=gelu,
        ROWS=_ROWS,
        COLUMNS=tiling.columns,
        STRIDE=tiling.stride,
        num_warps=4,
        num_stages=tiling.stages,
        **early_launch(rows.device),
    )
    return output
