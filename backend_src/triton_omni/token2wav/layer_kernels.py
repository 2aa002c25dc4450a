# SPDX-License-Identifier: Apache-2.0
"""Matrix products of a DiT layer for few rows, in the Triton language; they follow the rules of `kernels.py`.

For a single window a layer is bound by kernel launches and their waits, not by arithmetic. So each kernel starts on the
GPU while the previous one ends. A product with fewer tiles than multiprocessors splits its depth into parts, which the
next norm adds up.
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
"""Shared memory in bytes that a program may use, mostly taken by the tilings below; Hopper and the datacentre's
Blackwell have it.
"""


_ROWS = 64
"""Rows of a program: as many as Hopper's tensor cores take at once."""


class Tiling(NamedTuple):
    """Tile of a program in a product."""

    columns: int
    stride: int
    """Elements of the depth a step."""
    stages: int
    """Number of pipeline stages, one more than the tiles in flight."""
    parts: int = 1
    """Number of programs that share the depth of a tile."""


@dataclass(frozen=True)
class LayerTilings:
    """Tilings of a layer's products; None = the library's product."""

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
"""Tilings by maximum rows; the fastest of those tried on an H200 at the published layer width."""


def tilings_for(rows: int) -> LayerTilings:
    """Return the tilings of a layer for `rows` rows."""
    return next((tilings for most, tilings in _TILINGS.items() if rows <= most), LIBRARY)


def fit(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if the tilings fit: in half precision, on a GPU with enough shared memory; the interpreter has no
    limit.
    """
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
        # Reads after the end of the depth, or of the rows, give zero.
        at = part * SHARE + step * STRIDE
        ours, theirs = rows.load([first_row, at]), weights.load([first_column, at])
        total = tl.dot(ours, theirs.T, total, input_precision="ieee")
    total += bias[None, :]
    if GELU:
        # tanh(x) = 2 sigmoid(2 x) - 1; the factor is 2 sqrt(2 / pi).
        total *= tl.sigmoid(1.5957691216057308 * (total + 0.044715 * total * total * total))
    places = output + (part * count + row[:, None]) * WIDTH + column[None, :]
    tl.store(places, total.to(output.dtype.element_ty), mask=(row < count)[:, None] & (column < WIDTH)[None, :])


def product(rows: Tensor, weights: Tensor, biases: Tensor, tiling: Tiling, *, gelu: bool = False) -> Tensor:
    """Multiply `rows` [R, K] by the transpose of `weights` [N, K], and add `biases` [N].

    Args:
        tiling: its tiles and parts.
        gelu: apply a GELU (tanh form); only with one part.

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
