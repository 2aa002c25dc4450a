# SPDX-License-Identifier: Apache-2.0
"""Fused kernels of the DiT's attention in the Triton language; they follow the rules of `kernels.py`."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_omni.core.kernel_launch import early_launch, let_next_begin, padded_rows, wait_for_inputs
from triton_omni.token2wav.batching import Blocks
from triton_omni.token2wav.window_cache import LayerKVCache


@triton.jit
def _angles(cosines, sines, frames, loaded, is_rotated, PAIRS: tl.constexpr):
    """Load cosines and sines [TILE, PAIRS] of the frames that are `loaded`; 1 and 0 if this is not the rotated head."""
    at = frames[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    cosine = tl.where(is_rotated, tl.load(cosines + at, mask=loaded[:, None], other=1.0), 1.0)
    return cosine, tl.where(is_rotated, tl.load(sines + at, mask=loaded[:, None], other=0.0), 0.0)


@triton.jit
def _rotated_pairs(
    projected, cosine, sine, frames, loaded, STRIDE: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr
):
    """Load and rotate the even and odd dimensions [TILE, PAIRS] of one head's frames."""
    lanes = tl.arange(0, 2 * PAIRS)
    tile = tl.load(projected + frames[:, None] * STRIDE + lanes[None, :], mask=loaded[:, None], other=0.0)
    even, odd = tl.split(tl.reshape(tile.to(tl.float32), [TILE, PAIRS, 2]))
    return (
        (even * cosine - odd * sine).to(projected.dtype.element_ty),
        (odd * cosine + even * sine).to(projected.dtype.element_ty),
    )


@triton.jit
def _keys_and_values(
    keys,
    cosine,
    sine,
    frames,
    loaded,
    STRIDE: tl.constexpr,
    INNER: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Load one head's rotated keys by even and odd dimensions [TILE, HEAD_DIM / 2], and its values [TILE, HEAD_DIM].

    A value is stored INNER elements after its key.
    """
    even, odd = _rotated_pairs(keys, cosine, sine, frames, loaded, STRIDE, HEAD_DIM // 2, TILE)
    lanes = INNER + tl.arange(0, HEAD_DIM)
    value = tl.load(keys + frames[:, None] * STRIDE + lanes[None, :], mask=loaded[:, None], other=0.0)
    return even, odd, value


@triton.jit
def _softmax_step(scores, value, peak, total, output):
    """Add one more block's scores [TILE, TILE] and values to the running softmax."""
    # -1e30 keeps rows that have seen no key yet from subtracting infinities.
    higher = tl.maximum(tl.maximum(peak, tl.max(scores, 1)), -1e30)
    weights = tl.exp(scores - higher[:, None])
    shrink = tl.exp(peak - higher)
    total = total * shrink + tl.sum(weights, 1)
    output = output * shrink[:, None]
    output += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return higher, total, output


@triton.jit
def _block_attention(
    qkv,
    cosines,
    sines,
    first,
    before,
    own,
    after,
    pages,
    found,
    number,
    cosines_before,
    sines_before,
    mixed,
    scale,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BACK: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    block, head = tl.program_id(0), tl.program_id(1)
    inner: tl.constexpr = HEADS * HEAD_DIM
    pairs: tl.constexpr = HEAD_DIM // 2
    count = tl.load(own + block)
    # A recorded step has more blocks than most batches fill.
    if count == 0:
        return
    places = tl.arange(0, TILE)
    is_rotated, inside = head < ROTARY_HEADS, places < count
    frames = tl.load(first + block).to(tl.int64) + places
    query = qkv + head * HEAD_DIM
    cosine, sine = _angles(cosines, sines, frames, inside, is_rotated, pairs)

    wait_for_inputs(EARLY)
    even, odd = _rotated_pairs(query, cosine, sine, frames, inside, 3 * inner, pairs, TILE)
    peak = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    output = tl.zeros([TILE, HEAD_DIM], tl.float32)
    for side in tl.static_range(-BACK, AHEAD + 1):
        loaded, keys, key_cosine, key_sine = inside, frames, cosine, sine
        if side != 0:
            loaded = places < tl.load((before if side < 0 else after) + block)
            keys = frames + (-BLOCK if side < 0 else count)
            key_cosine, key_sine = _angles(cosines, sines, keys, loaded, is_rotated, pairs)
        key_even, key_odd, value = _keys_and_values(
            query + inner, key_cosine, key_sine, keys, loaded, 3 * inner, inner, HEAD_DIM, TILE
        )
        if side < 0:
            page = tl.load(found + block)
            if page >= 0:
                # An earlier window's block precedes this one: read its rows.
                loaded = places < BLOCK
                left = pages + (page + tl.load(number)).to(tl.int64) * PAGE + head * HEAD_DIM
                key_cosine, key_sine = _angles(cosines_before, sines_before, places, loaded, is_rotated, pairs)
                key_even, key_odd, value = _keys_and_values(
                    left, key_cosine, key_sine, places, loaded, 2 * inner, inner, HEAD_DIM, TILE
                )
        scores = tl.dot(even, tl.trans(key_even), input_precision="ieee")
        scores += tl.dot(odd, tl.trans(key_odd), input_precision="ieee")
        scores = tl.where(loaded[None, :], scores * scale, -float("inf"))
        peak, total, output = _softmax_step(scores, value, peak, total, output)
    output = output / tl.where(total > 0.0, total, 1.0)[:, None]
    target = mixed + frames[:, None] * inner + head * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(target, output.to(mixed.dtype.element_ty), mask=inside[:, None])


def block_attention(
    qkv: Tensor,
    rotary: tuple[Tensor, Tensor],
    blocks: Blocks,
    reach: tuple[int, int],
    past: LayerKVCache | None,
    *,
    block_size: int,
    heads: int,
    rotary_heads: int,
    early: bool = False,
) -> Tensor:
    """Compute rotary embedding and attention of every block over the blocks it can see (`attention.block_attention`).

    Args:
        qkv: [R, 3 x heads x head_dim], rows of query, key and value side by side, not rotated.
        rotary: cosine and sine [R, head_dim / 2] fp32 of every row.
        blocks: of the rows; one without rows computes nothing.
        reach: (look-back, look-ahead) in blocks, each 0 or 1.
        past: keys and values that a layer with look-back reads before blocks without a previous one, in the dtype of
            `qkv`.
        block_size: maximum rows of a block.
        heads: number of heads; the first `rotary_heads` are rotated.
        early: see `early_launch`.

    Returns:
        [R, heads x head_dim] in the dtype of `qkv`; rows of no block hold no meaning.
    """
    rows, width = qkv.shape
    head_dim = width // (3 * heads)
    mixed = torch.empty(rows, width // 3, dtype=qkv.dtype, device=qkv.device)
    # Without look-back the kernel does not read these arguments: any tensor will do.
    before = (qkv,) * 5
    if past is not None:
        before = (past.pages, past.found, past.number, past.rotary.cos, past.rotary.sin)
    _block_attention[(len(blocks.first), heads)](
        qkv,
        *rotary,
        blocks.first,
        blocks.before,
        blocks.own,
        blocks.after,
        *before,
        mixed,
        1.0 / math.sqrt(head_dim),
        PAGE=before[0].stride(0),
        HEADS=heads,
        HEAD_DIM=head_dim,
        ROTARY_HEADS=rotary_heads,
        BLOCK=block_size,
        TILE=padded_rows(block_size),
        BACK=reach[0],
        AHEAD=reach[1],
        num_warps=2,
        **early_launch(qkv.device, early=early),
    )
    return mixed


@triton.jit
def _store_past(
    qkv,
    first,
    pages,
    left,
    number,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    block, head = tl.program_id(0), tl.program_id(1)
    inner: tl.constexpr = HEADS * HEAD_DIM
    page = tl.load(left + block)
    if page >= 0:
        places = tl.arange(0, TILE)
        lanes = head * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        inside = (places < BLOCK)[:, None]
        source = qkv + (tl.load(first + block).to(tl.int64) + places)[:, None] * 3 * inner + inner + lanes
        target = pages + (page + tl.load(number)).to(tl.int64) * PAGE + places[:, None] * 2 * inner + lanes
        tl.store(target, tl.load(source, mask=inside), mask=inside)
        tl.store(target + inner, tl.load(source + inner, mask=inside), mask=inside)


def leave_past(qkv: Tensor, blocks: Blocks, past: LayerKVCache, *, heads: int, early: bool = False) -> None:
    """Write the keys and values of the blocks that later windows read (`window_cache.LayerKVCache.leave`).

    Args:
        qkv: [R, 3 x heads x head_dim], see `block_attention`, which must have been launched before.
        blocks: of the rows; those that are written are whole.
        past: pages in the dtype of `qkv`.
        heads: of the attention.
        early: see `early_launch`.
    """
    block_size = past.pages.shape[1]
    _store_past[(len(past.left), heads)](
        qkv,
        blocks.first,
        past.pages,
        past.left,
        past.number,
        PAGE=past.pages.stride(0),
        HEADS=heads,
        HEAD_DIM=qkv.shape[1] // (3 * heads),
        BLOCK=block_size,
        TILE=triton.next_power_of_2(block_size),
        num_warps=2,
        **early_launch(qkv.device, early=early),
    )
