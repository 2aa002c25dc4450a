# SPDX-License-Identifier: Apache-2.0
"""A DiT layer's matrix products for few rows, in the Triton language; like `kernels.py`, of which they share the rules.

Of a window alone a layer is bound by its launches and by what each waits for, not by arithmetic. So each kernel is laid
out on the GPU while the one before ends, a product with fewer tiles than there are multiprocessors shares out its
depth, and where frames see their own block alone, queries, keys and values are not written and read again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_omni.early_kernels import early_launch, wait_for_inputs

SHARED_BYTES = 227 << 10
"""Shared memory of a program, which the tilings below take most of; Hopper's and the datacentre's Blackwell have it."""


class Tiling(NamedTuple):
    """What a program takes of a product at a time."""

    rows: int
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
    attention: Tiling | None
    """Of queries, keys and values together with attention, for frames that see their own block alone."""
    out: Tiling | None
    enter: Tiling | None
    leave: Tiling | None


_TILINGS = (
    (
        64,
        LayerTilings(
            qkv=Tiling(64, 32, 128, 5),
            attention=None,
            out=Tiling(64, 32, 128, 5, parts=4),
            enter=Tiling(64, 32, 128, 6),
            leave=Tiling(64, 32, 128, 5, parts=4),
        ),
    ),
    (
        128,
        LayerTilings(
            qkv=Tiling(64, 64, 128, 5),
            attention=None,
            out=Tiling(64, 64, 128, 5, parts=4),
            enter=Tiling(64, 32, 128, 5),
            leave=Tiling(64, 64, 128, 5, parts=4),
        ),
    ),
    (
        256,
        LayerTilings(
            qkv=Tiling(64, 64, 128, 3),
            attention=Tiling(64, 64, 128, 3),
            out=Tiling(64, 64, 128, 5, parts=2),
            enter=Tiling(64, 64, 128, 5),
            leave=Tiling(64, 64, 128, 5, parts=2),
        ),
    ),
    (
        512,
        LayerTilings(
            qkv=None,
            attention=Tiling(64, 64, 128, 3),
            out=Tiling(64, 64, 128, 5),
            enter=None,
            leave=Tiling(64, 64, 128, 5),
        ),
    ),
)
"""By the most rows for which they are the fastest of those tried on an H200, a layer being as wide as published."""
LIBRARY = LayerTilings(None, None, None, None, None)


def tilings_for(rows: int) -> LayerTilings:
    """How a layer of so many rows is computed."""
    return next((tilings for most, tilings in _TILINGS if rows <= most), LIBRARY)


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
    wait_for_inputs(EARLY)
    first_column, first_row, part = tl.program_id(0) * COLUMNS, tl.program_id(1) * ROWS, tl.program_id(2)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(SHARE // STRIDE):
        # What lies behind the depth, or the rows, is zero.
        at = part * SHARE + step * STRIDE
        ours, theirs = rows.load([first_row, at]), weights.load([first_column, at])
        total = tl.dot(ours, theirs.T, total, input_precision="ieee")
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    if part == 0:
        total += tl.load(biases + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
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
    _product[(triton.cdiv(width, tiling.columns), triton.cdiv(count, tiling.rows), parts)](
        TensorDescriptor.from_tensor(rows, [tiling.rows, tiling.stride]),
        TensorDescriptor.from_tensor(weights, [tiling.columns, tiling.stride]),
        biases,
        output,
        count,
        WIDTH=width,
        SHARE=triton.cdiv(triton.cdiv(depth, tiling.stride), parts) * tiling.stride,
        GELU=gelu,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        STRIDE=tiling.stride,
        num_warps=4,
        num_stages=tiling.stages,
        **early_launch(rows.device),
    )
    return output


@triton.jit
def _rotated(values, cosines, sines, frames, inside, PAIRS: tl.constexpr, TILE: tl.constexpr):
    """One head's frames [TILE, 2 PAIRS], rotated by pairs of neighbouring dimensions."""
    even, odd = tl.split(tl.reshape(values.to(tl.float32), [TILE, PAIRS, 2]))
    angles = frames[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    cosine = tl.load(cosines + angles, mask=inside[:, None], other=1.0)
    sine = tl.load(sines + angles, mask=inside[:, None], other=0.0)
    rotated = tl.join(even * cosine - odd * sine, odd * cosine + even * sine)
    return tl.reshape(rotated, [TILE, 2 * PAIRS]).to(values.dtype)


@triton.jit
def _own_blocks(query, key, value, block, frame, valid, scale):
    """Attention [TILE, HEAD_DIM] of frames to the first `valid` ones of their own block."""
    seen = (block[:, None] == block[None, :]) & (frame < valid)[None, :]
    scores = tl.where(seen, tl.dot(query, tl.trans(key), input_precision="ieee") * scale, -float("inf"))
    # -1e30 keeps rows that see no key from subtracting infinities.
    shares = tl.exp(scores - tl.maximum(tl.max(scores, 1), -1e30)[:, None])
    total = tl.sum(shares, 1)
    output = tl.dot(shares.to(value.dtype), value, input_precision="ieee")
    return output / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit
def _own_block_attention(
    rows,
    weights,
    biases,
    cosines,
    sines,
    valid,
    mixed,
    count,
    scale,
    DEPTH: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    STRIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    head, first = tl.program_id(0), tl.program_id(1) * BLOCKS
    inner: tl.constexpr = HEADS * HEAD_DIM
    lane = head * HEAD_DIM
    query = tl.zeros([TILE, HEAD_DIM], tl.float32)
    key = tl.zeros([TILE, HEAD_DIM], tl.float32)
    value = tl.zeros([TILE, HEAD_DIM], tl.float32)
    for at in range(0, DEPTH, STRIDE):
        ours = rows.load([first * BLOCK, at])
        query = tl.dot(ours, weights.load([lane, at]).T, query, input_precision="ieee")
        key = tl.dot(ours, weights.load([inner + lane, at]).T, key, input_precision="ieee")
        value = tl.dot(ours, weights.load([2 * inner + lane, at]).T, value, input_precision="ieee")
    kind = mixed.dtype.element_ty
    places, lanes = tl.arange(0, TILE), lane + tl.arange(0, HEAD_DIM)
    query = (query + tl.load(biases + lanes).to(tl.float32)[None, :]).to(kind)
    key = (key + tl.load(biases + inner + lanes).to(tl.float32)[None, :]).to(kind)
    value = (value + tl.load(biases + 2 * inner + lanes).to(tl.float32)[None, :]).to(kind)
    frames, block = first * BLOCK + places, places // BLOCK
    inside = (places < BLOCKS * BLOCK) & (frames < count)
    if head < ROTARY_HEADS:
        query = _rotated(query, cosines, sines, frames, inside, HEAD_DIM // 2, TILE)
        key = _rotated(key, cosines, sines, frames, inside, HEAD_DIM // 2, TILE)
    known = tl.load(valid + first + block, mask=inside, other=0)
    output = _own_blocks(query, key, value, block, places % BLOCK, known, scale)
    tl.store(mixed + frames[:, None] * inner + lanes[None, :], output.to(kind), mask=inside[:, None])


def own_block_attention(
    rows: Tensor,
    weights: Tensor,
    biases: Tensor,
    rotary: tuple[Tensor, Tensor],
    valid_frames: Tensor,
    tiling: Tiling,
    *,
    heads: int,
    rotary_heads: int,
) -> Tensor:
    """Projection, rotary embedding and attention of every block over itself alone (`attention.block_attention`).

    Args:
        rows: [R, K], R = N x block.
        weights: [3 x heads x head_dim, K] of query, key and value.
        biases: [3 x heads x head_dim].
        rotary: cosine and sine [R, head_dim / 2] fp32 of every row.
        valid_frames: int32 [N], of each block.
        tiling: its rows hold at least one block; its columns are a head's.
        heads: of them the first `rotary_heads` are rotated.

    Returns:
        [R, heads x head_dim] in the dtype of `rows`.
    """
    (count, depth), blocks, width = rows.shape, len(valid_frames), len(weights) // 3
    block, head_dim = count // blocks, width // heads
    together = tiling.rows // block
    mixed = torch.empty(count, width, dtype=rows.dtype, device=rows.device)
    _own_block_attention[(heads, triton.cdiv(blocks, together))](
        TensorDescriptor.from_tensor(rows, [tiling.rows, tiling.stride]),
        TensorDescriptor.from_tensor(weights, [head_dim, tiling.stride]),
        biases,
        *rotary,
        valid_frames,
        mixed,
        count,
        1.0 / math.sqrt(head_dim),
        DEPTH=depth,
        HEADS=heads,
        HEAD_DIM=head_dim,
        ROTARY_HEADS=rotary_heads,
        BLOCK=block,
        BLOCKS=together,
        TILE=tiling.rows,
        STRIDE=tiling.stride,
        num_warps=4,
        num_stages=tiling.stages,
        **early_launch(rows.device),
    )
    return mixed
