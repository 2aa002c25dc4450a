# SPDX-License-Identifier: Apache-2.0
"""Attention of a decode step in one launch, in the Triton language.

A step of one token a sequence is bound by launches and memory latency, not by arithmetic. Separate kernels for
rotation, cache write, scheduling, attention and combination take a third of such a step. Sums are in float32. It knows
tensors, neither vLLM nor the networks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_omni.core.kernel_launch import early_launch, let_next_begin, padded_rows, wait_for_inputs

KEYS = 64
"""Cached keys that a program of attention takes at a time."""
_KEYS_OF_FEW = 128
"""The same with `_FEW_PAIRS` at most, which leaves half as many parts to combine."""
_FEW_PAIRS = 8
"""With `MOST_SPLITS` programs a pair, each has a multiprocessor alone; one holds no two with twice the warps."""
MOST_SPLITS = 16
"""Programs that share one sequence's keys at most."""
_ENOUGH_PROGRAMS = 256
"""About two a multiprocessor of the largest GPUs; more would wait for each other."""
_LOWEST: tl.constexpr = tl.constexpr(-1e30)
"""Replaces minus infinity, since the difference of two infinities would be NaN."""
_LOG2_E = 1.4426950408889634


class Cache(NamedTuple):
    """Keys and values of one layer in the paged cache, and where a step's sequences lie in it."""

    blocks: Tensor
    """[blocks, heads, tokens of a block, 2 D]: each head's keys beside its values, in any order in memory."""
    table: Tensor
    """int32 [B, blocks of the longest sequence]."""
    lengths: Tensor
    """int32 [B], tokens of each sequence with the step's own; 0 = no sequence."""


class Rotation(NamedTuple):
    """M-RoPE's angles: HF's `apply_multimodal_rotary_pos_emb`, which rotates D / 2 pairs by one axis or another."""

    positions: Tensor
    """int64 [3, B], of each axis."""
    table: Tensor
    """[positions, D], the cosines of all pairs and then their sines."""
    sections: tuple[int, int, int]
    """Pairs of each axis."""


class Projected(NamedTuple):
    """Queries, keys and values of each sequence's new token, by head, as a projection leaves them."""

    parts: Tensor
    """[S, B, (heads + 2 key heads) D], to be summed."""
    biases: Tensor | None = None
    """[(heads + 2 key heads) D], to be added."""


@triton.jit
def _column(parts, biases, at, wanted, part_stride, PARTS: tl.constexpr, kind: tl.constexpr):
    """Load the projected columns `at`, where `wanted`: fp32, rounded as the plain path's tensors are."""
    total = tl.load(parts + at, mask=wanted, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * part_stride + at, mask=wanted, other=0.0)
    if biases is not None:
        total += tl.load(biases + at, mask=wanted, other=0.0).to(tl.float32)
    return total.to(kind).to(tl.float32)


@triton.jit
def _rotated(
    parts, biases, at, wanted, cosine, sine, part_stride, PARTS: tl.constexpr, HALF: tl.constexpr, kind: tl.constexpr
):
    """Return both halves of rotated heads; the first half was projected to the columns `at`."""
    first = _column(parts, biases, at, wanted, part_stride, PARTS, kind)
    second = _column(parts, biases, at + HALF, wanted, part_stride, PARTS, kind)
    return (first * cosine - second * sine).to(kind), (second * cosine + first * sine).to(kind)


@triton.jit
def _angles(positions, rotations, length, axis_stride, HALF: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Return cosines and sines [HALF] of a sequence's new token; without a sequence, any values."""
    lanes = tl.arange(0, HALF)
    axis = tl.where(lanes < FIRST, 0, tl.where(lanes < SECOND, 1, 2))
    there = lanes < tl.where(length > 0, HALF, 0)
    at = tl.load(positions + axis * axis_stride, mask=there, other=0) * (2 * HALF) + lanes
    return tl.load(rotations + at).to(tl.float32), tl.load(rotations + at + HALF).to(tl.float32)


@triton.jit
def _own_tiles(length, split, TILE: tl.constexpr, SPLITS: tl.constexpr):
    """Return the number of programs that share a sequence's keys, and this program's first tile and end."""
    tiles = tl.cdiv(length, TILE)
    share = tl.maximum(tl.cdiv(tiles, SPLITS), 1)
    return tl.cdiv(tiles, share), split * share, tl.minimum((split + 1) * share, tiles)


@triton.jit
def _nothing_seen(GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """Return an empty running softmax: largest scores, sums of weights, weighted values."""
    best = tl.full([GROUP], _LOWEST, tl.float32)
    return best, tl.zeros([GROUP], tl.float32), tl.zeros([GROUP, WIDTH], tl.float32)


@triton.jit
def _merge(best, total, summed, other_best, other_total, other_summed):
    """Join two running softmaxes."""
    joined = tl.maximum(best, other_best)
    ours, theirs = tl.exp2(best - joined), tl.exp2(other_best - joined)
    return joined, total * ours + other_total * theirs, summed * ours[:, None] + other_summed * theirs[:, None]


@triton.jit
def _cached_tile(
    own, table, tile, past, block_stride, place_stride, BLOCK: tl.constexpr, TILE: tl.constexpr, HALF: tl.constexpr
):
    """Both halves of a tile's keys [HALF, TILE] and its values [TILE, 2 HALF]; 0 from `past` on."""
    lanes, dims, places = tl.arange(0, HALF), tl.arange(0, 2 * HALF), tile * TILE + tl.arange(0, TILE)
    cached = places < past
    blocks = tl.load(table + places // BLOCK, mask=cached, other=0).to(tl.int64)
    at = own + blocks * block_stride + (places % BLOCK) * place_stride
    key_1 = tl.load(at[None, :] + lanes[:, None], mask=cached[None, :], other=0.0)
    key_2 = tl.load(at[None, :] + HALF + lanes[:, None], mask=cached[None, :], other=0.0)
    return key_1, key_2, tl.load(at[:, None] + 2 * HALF + dims[None, :], mask=cached[:, None], other=0.0)


@triton.jit
def _over_tile(best, total, summed, query_1, query_2, key_1, key_2, value, cached, scale):
    """Join a tile's keys, of which `cached` are there, to a running softmax."""
    scores = tl.dot(query_1, key_1, input_precision="ieee") + tl.dot(query_2, key_2, input_precision="ieee")
    scores = tl.where(tl.arange(0, key_1.shape[1])[None, :] < cached, scores * scale, float("-inf"))
    highest = tl.maximum(best, tl.max(scores, 1))
    weights, kept = tl.exp2(scores - highest[:, None]), tl.exp2(best - highest)
    summed = summed * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return highest, total * kept + tl.sum(weights, 1), summed


@triton.jit
def _with_own_token(best, total, summed, query_1, query_2, key_1, key_2, value, kept, scale):
    """Join the step's own token, and keep its key and value in the cache."""
    GROUP: tl.constexpr = query_1.shape[0]
    HALF: tl.constexpr = query_1.shape[1]
    lanes, dims = tl.arange(0, HALF), tl.arange(0, 2 * HALF)
    tl.store(kept + lanes, key_1)
    tl.store(kept + HALF + lanes, key_2)
    tl.store(kept + 2 * HALF + dims, value)
    score = tl.sum(query_1.to(tl.float32) * key_1.to(tl.float32)[None, :], 1)
    score = (score + tl.sum(query_2.to(tl.float32) * key_2.to(tl.float32)[None, :], 1)) * scale
    weight = tl.full([GROUP], 1.0, tl.float32)
    return _merge(best, total, summed, score, weight, value.to(tl.float32)[None, :])


@triton.jit
def _store_partial(part, wanted, best, total, summed):
    """Store the `wanted` rows of a running softmax at `part` [GROUP], for the program that combines the parts."""
    WIDTH: tl.constexpr = summed.shape[1]
    tl.store(part[:, None] + tl.arange(0, WIDTH)[None, :], summed, mask=wanted[:, None])
    tl.store(part + WIDTH, best, mask=wanted)
    tl.store(part + WIDTH + 1, total, mask=wanted)


@triton.jit
def _load_partial(parts, part, used, SHARED: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr):
    """Load the partial result of one of the `used` programs, bypassing the L1 cache (.cg); programs after the last give
    nothing.
    """
    theirs, dims = parts + part * PART, tl.arange(0, WIDTH)
    wanted = tl.arange(0, parts.shape[0]) < tl.where(part < used, SHARED, 0)
    return (
        tl.load(theirs + WIDTH, mask=wanted, other=_LOWEST, cache_modifier=".cg"),
        tl.load(theirs + WIDTH + 1, mask=wanted, other=0.0, cache_modifier=".cg"),
        tl.load(theirs[:, None] + dims[None, :], mask=wanted[:, None], other=0.0, cache_modifier=".cg"),
    )


@triton.jit
def _all_parts(parts, used, SHARED: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr):
    """Combine the parts of all programs, four loads at a time."""
    best, total, summed = _nothing_seen(parts.shape[0], WIDTH)
    for part in range(0, used, 4):
        best_0, total_0, summed_0 = _load_partial(parts, part, used, SHARED, PART, WIDTH)
        best_1, total_1, summed_1 = _load_partial(parts, part + 1, used, SHARED, PART, WIDTH)
        best_2, total_2, summed_2 = _load_partial(parts, part + 2, used, SHARED, PART, WIDTH)
        best_3, total_3, summed_3 = _load_partial(parts, part + 3, used, SHARED, PART, WIDTH)
        best, total, summed = _merge(best, total, summed, best_0, total_0, summed_0)
        best, total, summed = _merge(best, total, summed, best_1, total_1, summed_1)
        best, total, summed = _merge(best, total, summed, best_2, total_2, summed_2)
        best, total, summed = _merge(best, total, summed, best_3, total_3, summed_3)
    return best, total, summed


# One long function: its programs end at four places, and a called function could not end them.
@triton.jit
def _decode_attention(
    projected,
    biases,
    positions,
    rotations,
    cache,
    table,
    lengths,
    partials,
    arrivals,
    output,
    scale,
    part_stride,
    projected_stride,
    axis_stride,
    block_stride,
    head_stride,
    place_stride,
    table_stride,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    pair, split = tl.program_id(0), tl.program_id(1)
    sequence, head = pair // KEY_HEADS, pair % KEY_HEADS
    SHARED: tl.constexpr = HEADS // KEY_HEADS
    WIDTH: tl.constexpr = 2 * HALF
    rows, lanes, dims = tl.arange(0, GROUP), tl.arange(0, HALF), tl.arange(0, WIDTH)
    queries = rows < SHARED
    # Data of earlier steps is prefetched while the projection still runs: the cache, and all that the step knew before
    # its first layer.
    length = tl.load(lengths + sequence)
    used, from_tile, to_tile = _own_tiles(length, split, TILE, SPLITS)
    past, own, blocks_of = length - 1, cache + head * head_stride, table + sequence * table_stride
    key_1, key_2, value = _cached_tile(own, blocks_of, from_tile, past, block_stride, place_stride, BLOCK, TILE, HALF)
    cosine, sine = _angles(positions + sequence, rotations, length, axis_stride, HALF, FIRST, SECOND)
    kept = own + (past % BLOCK) * place_stride
    kept += tl.load(blocks_of + tl.maximum(past, 0) // BLOCK).to(tl.int64) * block_stride

    wait_for_inputs(EARLY)
    written = output + (sequence * HEADS + head * SHARED + rows[:, None]) * WIDTH + dims[None, :]
    if length == 0:
        if split == 0:
            tl.store(written, tl.zeros([GROUP, WIDTH], output.dtype.element_ty), mask=queries[:, None])
        return
    if split >= used:
        return
    kind: tl.constexpr = cache.dtype.element_ty
    row = projected + sequence.to(tl.int64) * projected_stride
    at = (head * SHARED + rows[:, None]) * WIDTH + lanes[None, :]
    query_1, query_2 = _rotated(
        row, biases, at, queries[:, None], cosine[None, :], sine[None, :], part_stride, PARTS, HALF, kind
    )
    # Load the keys with the queries, though only one program needs them: a later load would cost another wait.
    has_own = split == used - 1
    key_at, value_at = (HEADS + head) * WIDTH + lanes, (HEADS + KEY_HEADS + head) * WIDTH + dims
    own_1, own_2 = _rotated(
        row, biases, key_at, lanes < tl.where(has_own, HALF, 0), cosine, sine, part_stride, PARTS, HALF, kind
    )
    own_value = _column(row, biases, value_at, dims < tl.where(has_own, WIDTH, 0), part_stride, PARTS, kind).to(kind)

    best, total, summed = _nothing_seen(GROUP, WIDTH)
    cached = past - from_tile * TILE
    best, total, summed = _over_tile(best, total, summed, query_1, query_2, key_1, key_2, value, cached, scale)
    for tile in range(from_tile + 1, to_tile):
        key_1, key_2, value = _cached_tile(own, blocks_of, tile, past, block_stride, place_stride, BLOCK, TILE, HALF)
        cached = past - tile * TILE
        best, total, summed = _over_tile(best, total, summed, query_1, query_2, key_1, key_2, value, cached, scale)
    if has_own:
        best, total, summed = _with_own_token(
            best, total, summed, query_1, query_2, own_1, own_2, own_value, kept, scale
        )

    if used == 1:
        tl.store(written, (summed / total[:, None]).to(output.dtype.element_ty), mask=queries[:, None])
        return
    # [pair, split, row, WIDTH + 2]: weighted values, the largest score, the sum of weights.
    PART: tl.constexpr = FEW * (WIDTH + 2)
    parts = partials + pair.to(tl.int64) * (SPLITS * PART)
    _store_partial(parts + split * PART + rows * (WIDTH + 2), queries, best, total, summed)
    # All threads' stores must be done before the arrival is counted.
    tl.debug_barrier()
    if tl.atomic_add(arrivals + pair, 1, sem="acq_rel") < used - 1:
        return
    # Only as many rows as there are queries, so that the loads in flight fit into registers.
    few = tl.arange(0, FEW)
    best, total, summed = _all_parts(parts + few * (WIDTH + 2), used, SHARED, PART, WIDTH)
    tl.store(arrivals + pair, 0)
    summed /= tl.where(few < SHARED, total, 1.0)[:, None]
    written = output + (sequence * HEADS + head * SHARED + few[:, None]) * WIDTH + dims[None, :]
    tl.store(written, summed.to(output.dtype.element_ty), mask=(few < SHARED)[:, None])


def splits(pairs: int) -> int:
    """Programs that share each pair of a sequence and a key head; a power of two."""
    # The number of pairs is rounded up to a power of two.
    return max(1, min(MOST_SPLITS, _ENOUGH_PROGRAMS >> (pairs - 1).bit_length()))


def tile(pairs: int) -> tuple[int, int]:
    """Keys that a program takes at a time, and its warps, by the pairs of a sequence and a key head."""
    return (_KEYS_OF_FEW, 8) if pairs <= _FEW_PAIRS else (KEYS, 4)


def decode_attention(
    projected: Projected, rotation: Rotation, cache: Cache, arrivals: Tensor, *, heads: int, scale: float
) -> Tensor:
    """Attention of one new token a sequence, rotated here, to the sequence so far; its key and value join the cache.

    One launch in place of rotation, cache write, scheduling, attention and combination. Source of the split over keys:
    Flash-Decoding (Dao et al., 2023); the last program combines the parts.

    Args:
        projected: the new tokens.
        rotation: of the new tokens. Rotation, table, lengths and cache are read while the previous kernel runs, so a
            kernel without early launch must follow their writer.
        cache: of this layer; entries after a sequence's length may be anything.
        arrivals: int32, zeros for every pair of a sequence and a key head; zeros again after the launch.
        heads: of the queries; a multiple of the key heads.
        scale: of the scores.

    Returns:
        [B, heads D] in the dtype of the cache, 0 where there is no sequence.
    """
    parts, biases = projected
    (summands, count, _), device, (_, key_heads, block, double) = parts.shape, parts.device, cache.blocks.shape
    half, pairs = double // 4, count * key_heads
    group, few = padded_rows(heads // key_heads), triton.next_power_of_2(heads // key_heads)
    shares, (keys, warps) = splits(pairs), tile(pairs)
    partials = torch.empty(pairs * shares * few * (double // 2 + 2), dtype=torch.float32, device=device)
    output = torch.empty(count, heads * double // 2, dtype=cache.blocks.dtype, device=device)
    block_stride, head_stride, place_stride, _ = cache.blocks.stride()
    first, second, _ = rotation.sections
    _decode_attention[(pairs, shares)](
        parts,
        biases,
        rotation.positions,
        rotation.table,
        cache.blocks,
        cache.table,
        cache.lengths,
        partials,
        arrivals,
        output,
        scale * _LOG2_E,
        parts.stride(0),
        parts.stride(1),
        rotation.positions.stride(0),
        block_stride,
        head_stride,
        place_stride,
        cache.table.stride(0),
        PARTS=summands,
        HEADS=heads,
        KEY_HEADS=key_heads,
        HALF=half,
        FIRST=first,
        SECOND=first + second,
        BLOCK=block,
        TILE=keys,
        GROUP=group,
        FEW=few,
        SPLITS=shares,
        num_warps=warps,
        num_stages=2,
        **early_launch(device),
    )
    return output
