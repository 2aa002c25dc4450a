# SPDX-License-Identifier: Apache-2.0
"""Drawing an id from a large vocabulary in two launches, in the Triton language.

`sampling.draw` takes twenty-five small kernels between two steps of an engine; one of them scans a row of 150,000 ids
alone. This module knows logits, but neither vLLM nor the stages.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_omni.core.kernel_launch import early_launch, padded_rows, wait_for_inputs

_BLOCK = 512
"""Ids of a block: one row of a program sums their weights, and the second launch scans the found block."""
_BLOCKS_A_PROGRAM = 8


@triton.jit
def _weigh_blocks(
    logits,
    highest,
    weights,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0) * TILE + tl.arange(0, TILE)
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(logits + row * SIZE + ids, mask=ids < SIZE, other=float("-inf")).to(tl.float32)
    best = tl.max(values, 1)
    # With all ids excluded, the difference of two infinities would be NaN.
    found = tl.exp(values - tl.where(best == float("-inf"), 0.0, best)[:, None])
    inside = block < blocks
    tl.store(highest + row * blocks + block, best, mask=inside)
    tl.store(weights + row * blocks + block, tl.sum(found, 1), mask=inside)


@triton.jit
def _inverted(weights, part, indices):
    """Return the index where the cumulative `weights` pass the part of their total, and the rest of that part.

    The index is never one of weight 0. `sampling._invert` is the plain form, and its comments say why.
    """
    cumulative = tl.cumsum(weights.to(tl.float64), 0)
    # Summed in parallel, sums need not grow from one to the next in their last bit.
    total = tl.max(cumulative, 0)
    target = part * total
    index = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), 0), indices.shape[0] - 1)
    weight = tl.sum(tl.where(indices == index, weights, 0.0), 0)
    heaviest = tl.min(tl.where(weights == tl.max(weights, 0), indices, indices.shape[0] - 1), 0)
    index = tl.where(weight > 0, index, heaviest)
    weight = tl.sum(tl.where(indices == index, weights, 0.0), 0).to(tl.float64)
    beyond = tl.sum(tl.where(indices == index, cumulative, 0.0), 0) - target
    return index, 1.0 - beyond / weight


@triton.jit
def _find_id(
    logits,
    highest,
    weights,
    uniforms,
    drawn,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    numbers, places = tl.arange(0, TILE), tl.arange(0, BLOCK)
    own = row * blocks + numbers
    best = tl.load(highest + own, mask=numbers < blocks, other=float("-inf"))
    sums = tl.load(weights + own, mask=numbers < blocks, other=0.0)
    block, left = _inverted(sums * tl.exp(best - tl.max(best, 0)), tl.load(uniforms + row), numbers)
    ids = block * BLOCK + places
    values = tl.load(logits + row * SIZE + ids, mask=ids < SIZE, other=float("-inf")).to(tl.float32)
    place, _ = _inverted(tl.exp(values - tl.max(values, 0)), left, places)
    # A row of NaN finds nothing. The reader of such a row fails that sequence, but the id must be valid.
    tl.store(drawn + row, tl.minimum(block * BLOCK + place, SIZE - 1).to(tl.int64))


def fused_draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """`sampling.draw` in two launches: blocks are weighed in parallel, then a block is found, and the id within it.

    Args:
        logits: float [B, V], copied where they are not contiguous; -inf marks ids that must not be drawn, at least one
            id is finite.
        uniforms: float64 [B] in [0, 1).

    Returns:
        int64 [B], for a row with NaN any id. The same ids as the plain form's, unless a number falls so near the
        bound of two ids that the order of a sum decides.
    """
    (rows, size), device, logits = logits.shape, logits.device, logits.contiguous()
    blocks = triton.cdiv(size, _BLOCK)
    highest = torch.empty(rows, blocks, dtype=torch.float32, device=device)
    weights, drawn = torch.empty_like(highest), torch.empty(rows, dtype=torch.int64, device=device)
    shape = {"SIZE": size, "BLOCK": _BLOCK, **early_launch(device)}
    _weigh_blocks[(triton.cdiv(blocks, _BLOCKS_A_PROGRAM), rows)](
        logits, highest, weights, TILE=_BLOCKS_A_PROGRAM, **shape
    )
    _find_id[(rows,)](logits, highest, weights, uniforms, drawn, TILE=padded_rows(blocks), **shape)
    return drawn
