# SPDX-License-Identifier: Apache-2.0
"""Matrix products of a decode step with what stands around them, in the Triton language.

For a few tokens a product is bound by reading its weights, and by the latency of walking along its depth: all
multiprocessors must read all the time, and what comes before and behind is to cost no launches of its own. Sums are in
float32. It knows tensors, neither vLLM nor the networks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_omni.early_kernels import early_launch, wait_for_inputs
from triton_omni.tiles import padded_rows

_NARROW = 1024
"""Hidden states of a talker, whose products fill no GPU."""
_COLUMNS = 64
"""Of a program: as many lines of weights as Hopper's tensor cores take at once."""
_GATED_COLUMNS = 32
"""Of each of two matrices."""
_STRIDE = 128
"""Depth at a time."""
_STAGES = 4
"""Tiles on their way, one more than are waited for."""
_MOST_PARTS = 16
"""Of a product whose depth is shared out."""
_ENOUGH_PROGRAMS = 132
"""One a multiprocessor of the largest GPUs; more of them leave more parts to be added up."""


class Unscaled(NamedTuple):
    """Hidden states in the middle of an RMS norm: times its weights, not yet divided by the root of the mean square."""

    values: Tensor
    """[M, N]."""
    squares: Tensor | None
    """fp32 [T, M], sums of squares of T parts of each row before the weights; None = nothing is left to do."""
    eps: float
    """Of the norm."""


def most_rows(width: int) -> int:
    """Tokens of a step for which these products are made, `width` being that of the hidden states.

    More are faster by a library: of 7B's wide thinker 64 took 1.1 to 1.3 times as long, of its narrow talker half.
    """
    return 64 if width <= _NARROW else 32


@triton.jit
def inverse_rms(squares, count, row, eps, WIDTH: tl.constexpr, TILES: tl.constexpr):
    """fp32 [ROWS] of `row` [ROWS]: what an `Unscaled` of `count` rows of WIDTH is to be multiplied by."""
    if TILES > 0:
        tile = tl.arange(0, triton.next_power_of_2(TILES))
        wanted = (tile < TILES)[:, None] & (row < count)[None, :]
        found = tl.load(squares + tile[:, None] * count + row[None, :], mask=wanted, other=0.0)
        inverse = tl.rsqrt(tl.sum(found, 0) / WIDTH + eps)
    else:
        inverse = tl.full(row.shape, 1.0, tl.float32)
    return inverse


@triton.jit
def _gated_product(
    rows,
    weights,
    squares,
    output,
    count,
    eps,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    row, column = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    scale = inverse_rms(squares, count, row, eps, DEPTH, TILES)[:, None]
    wanted, inside = (row < count)[:, None], (column < WIDTH)[None, :]
    left, right = rows + row[:, None] * DEPTH, weights + column.to(tl.int64)[None, :] * DEPTH
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(0, DEPTH, STRIDE):
        depth = at + tl.arange(0, STRIDE)
        known = depth < DEPTH
        ours = tl.load(left + depth[None, :], mask=wanted & known[None, :], other=0.0)
        gates = tl.load(right + depth[:, None], mask=inside & known[:, None], other=0.0)
        ups = tl.load(right + WIDTH * DEPTH + depth[:, None], mask=inside & known[:, None], other=0.0)
        gate += tl.dot(ours, gates, input_precision="ieee")
        up += tl.dot(ours, ups, input_precision="ieee")
    # Rounded where the plain path has a tensor.
    kind = output.dtype.element_ty
    gate, up = (gate * scale).to(kind).to(tl.float32), (up * scale).to(kind).to(tl.float32)
    gated = (gate / (1.0 + tl.exp(-gate)) * up).to(kind)
    tl.store(output + row[:, None] * WIDTH + column[None, :], gated, mask=wanted & inside)


def gated_product(hidden: Unscaled, weights: Tensor) -> Tensor:
    """SwiGLU's first half, `silu(gate) * up` [M, I], of `hidden` [M, K] and `weights` [2 I, K], all gates first.

    Source: Shazeer, GLU Variants Improve Transformer (2020); HF's `Qwen2MLP`.
    """
    rows, squares, eps = hidden
    (count, depth), width = rows.shape, len(weights) // 2
    output, tile = torch.empty(count, width, dtype=rows.dtype, device=rows.device), padded_rows(count)
    _gated_product[(triton.cdiv(width, _GATED_COLUMNS),)](
        rows,
        weights,
        squares,
        output,
        count,
        eps,
        WIDTH=width,
        DEPTH=depth,
        TILES=0 if squares is None else len(squares),
        ROWS=tile,
        COLUMNS=_GATED_COLUMNS,
        STRIDE=_STRIDE,
        # With fewer threads, each has its part of the sums in fewer moves.
        num_warps=2 if tile <= 32 else 4,
        num_stages=_STAGES,
        **early_launch(rows.device),
    )
    return output


@triton.jit
def _sum_of_products(rows, weights, first, begin, end, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr):
    """fp32 [COLUMNS, ROWS]: weights from the `first` on times all rows, from depth `begin` to `end`.

    Weights are on the left: there Hopper's tensor cores take 64 lines of them at once, straight from shared memory.
    """
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for at in range(begin, end, STRIDE):
        ours, theirs = rows.load([0, at]), weights.load([first, at])
        total = tl.dot(theirs, ours.T, total, input_precision="ieee")
    return total


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
    part, row, first = tl.program_id(1), tl.arange(0, ROWS), tl.program_id(0) * COLUMNS
    begin = part * SHARE
    summed = _sum_of_products(rows, weights, first, begin, tl.minimum(begin + SHARE, DEPTH), ROWS, COLUMNS, STRIDE)
    column = first + tl.arange(0, COLUMNS)
    wanted = (column < WIDTH)[:, None] & (row < count)[None, :]
    tl.store(parts + (part * count + row[None, :]) * WIDTH + column[:, None], summed, mask=wanted)


def shares(width: int, depth: int) -> tuple[int, int]:
    """By how many programs the depth of a product [M, depth] x [depth, width] is shared, and the depth of each."""
    wanted = min(_MOST_PARTS, triton.cdiv(_ENOUGH_PROGRAMS, triton.cdiv(width, _COLUMNS)))
    share = triton.cdiv(triton.cdiv(depth, _STRIDE), wanted) * _STRIDE
    return triton.cdiv(depth, share), share


def _by_tiles(rows: Tensor, weights: Tensor) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """Rows [M, K] and weights [N, K] as the copy engine fetches them, and how their product is launched."""
    tile = padded_rows(len(rows))
    tiles = (
        TensorDescriptor.from_tensor(rows, [tile, _STRIDE]),
        TensorDescriptor.from_tensor(weights, [_COLUMNS, _STRIDE]),
    )
    sizes = {"ROWS": tile, "COLUMNS": _COLUMNS, "STRIDE": _STRIDE}
    return tiles, {**sizes, "num_warps": 4, "num_stages": _STAGES, **early_launch(rows.device)}


def split_product(rows: Tensor, weights: Tensor) -> Tensor:
    """Parts [S, M, N] fp32 whose sum is `rows` [M, K] times the transpose of `weights` [N, K]; both contiguous.

    A library gives each program a tile of the output, of which a narrow one has fewer than there are multiprocessors.
    Here several programs share a tile's depth (split-K), and whoever reads the product adds their parts up. A line of
    either is a multiple of 16 bytes, as Hopper's copy engine fetches them.
    """
    (count, depth), width = rows.shape, len(weights)
    parts, share = shares(width, depth)
    output = torch.empty(parts, count, width, dtype=torch.float32, device=rows.device)
    tiles, launched = _by_tiles(rows, weights)
    grid = triton.cdiv(width, _COLUMNS), parts
    _split_product[grid](*tiles, output, count, WIDTH=width, DEPTH=depth, SHARE=share, **launched)
    return output


# One kernel and one function, long as it is: all but one of its programs end in its middle.
@triton.jit
def _residual_product(
    rows,
    weights,
    residual,
    gain,
    parts,
    arrivals,
    values,
    squares,
    count,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    SHARE: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    tile, part, row = tl.program_id(0), tl.program_id(1), tl.arange(0, ROWS)
    first, begin = tile * COLUMNS, part * SHARE
    summed = _sum_of_products(rows, weights, first, begin, tl.minimum(begin + SHARE, DEPTH), ROWS, COLUMNS, STRIDE)
    column = first + tl.arange(0, COLUMNS)
    at = row[None, :] * WIDTH + column[:, None]
    wanted = (column < WIDTH)[:, None] & (row < count)[None, :]
    tl.store(parts + part * count * WIDTH + at, summed, mask=wanted)
    # All threads' stores must be there before the one that counts arrivals says so.
    tl.debug_barrier()
    if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") < PARTS - 1:
        return
    tl.store(arrivals + tile, 0)
    total = tl.load(residual + at, mask=wanted, other=0.0).to(tl.float32)
    # Unrolled, so that all parts are on their way at once; they lie past this multiprocessor's own cache (.cg).
    for other in tl.static_range(PARTS):
        total += tl.load(parts + other * count * WIDTH + at, mask=wanted, other=0.0, cache_modifier=".cg")
    kind = residual.dtype.element_ty
    rounded = total.to(kind)
    tl.store(residual + at, rounded, mask=wanted)
    total = rounded.to(tl.float32)
    weighed = total * tl.load(gain + column, mask=column < WIDTH, other=0.0).to(tl.float32)[:, None]
    tl.store(values + at, weighed.to(kind), mask=wanted)
    tl.store(squares + tile * count + row, tl.sum(total * total, 0), mask=row < count)


def residual_product(
    rows: Tensor, weights: Tensor, residual: Tensor, gain: Tensor, eps: float, arrivals: Tensor
) -> Unscaled:
    """Add `rows` [M, K] times the transpose of `weights` [N, K] to `residual` [M, N] in place; gives its RMS norm.

    As `split_product`, but the last program of a tile adds the parts up. A norm needs the whole row, which no program
    has, so whoever reads it divides: the next product's sums, in place of its input.

    Args:
        gain: [N], the weight of the norm.
        eps: of the norm.
        arrivals: int32, zeros for every `columns` of N; zeros again behind the launch.
    """
    (count, depth), width = rows.shape, len(weights)
    parts, share = shares(width, depth)
    tiles = triton.cdiv(width, _COLUMNS)
    partials = torch.empty(parts, count, width, dtype=torch.float32, device=rows.device)
    values, squares = torch.empty_like(residual), partials.new_empty(tiles, count)
    descriptors, launched = _by_tiles(rows, weights)
    _residual_product[(tiles, parts)](
        *descriptors,
        residual,
        gain,
        partials,
        arrivals,
        values,
        squares,
        count,
        WIDTH=width,
        DEPTH=depth,
        SHARE=share,
        PARTS=parts,
        **launched,
    )
    return Unscaled(values, squares, eps)


@triton.jit
def _add_norm(
    parts,
    residual,
    weight,
    normed,
    eps,
    part_stride,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    columns = tl.arange(0, TILE)
    inside = columns < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + columns
    total = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    # Unrolled, so that all parts are on their way at once.
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * part_stride + at, mask=inside, other=0.0)
    rounded = total.to(residual.dtype.element_ty)
    tl.store(residual + at, rounded, mask=inside)
    total = rounded.to(tl.float32)
    scaled = total * tl.rsqrt(tl.sum(total * total, 0) / WIDTH + eps)
    kind = normed.dtype.element_ty
    tl.store(normed + at, scaled.to(kind) * tl.load(weight + columns, mask=inside, other=0.0), mask=inside)


def add_norm(parts: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add the sum of `parts` [S, M, N] fp32 (`split_product`) to `residual` [M, N] in place; gives its RMS norm [M, N].

    Args:
        weight: [N] of the norm.
        eps: of the norm.
    """
    count, width = residual.shape
    normed = torch.empty_like(residual)
    _add_norm[(count,)](
        parts,
        residual,
        weight,
        normed,
        eps,
        parts.stride(0),
        WIDTH=width,
        PARTS=len(parts),
        TILE=triton.next_power_of_2(width),
        num_warps=8,
        **early_launch(residual.device),
    )
    return normed
