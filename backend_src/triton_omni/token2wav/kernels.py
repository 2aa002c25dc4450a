# SPDX-License-Identifier: Apache-2.0
"""Fused kernels of token2wav in the Triton language: what plain PyTorch does in many small launches.

Each is the arithmetic of one plain function or module, named in its wrapper, in another order of launches. All
accumulate in float32, whatever dtype they read and write. They know nothing of windows or streams.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from triton_omni.token2wav.batching import Neighbours
from triton_omni.token2wav.noise import counters
from triton_omni.token2wav.past import LayerPast

SMALLEST_TILE = 16
"""Tensor cores multiply no smaller tiles."""


@triton.jit
def _residual_norm(
    hidden, branch, gate, shift, scale, normed, eps, WIDTH: tl.constexpr, HAS_BRANCH: tl.constexpr, TILE: tl.constexpr
):
    columns = tl.arange(0, TILE)
    inside = columns < WIDTH
    places = tl.program_id(0).to(tl.int64) * WIDTH + columns
    row = tl.load(hidden + places, mask=inside, other=0.0)
    if HAS_BRANCH:
        row += tl.load(gate + columns, mask=inside, other=0.0) * tl.load(branch + places, mask=inside, other=0.0)
        tl.store(hidden + places, row, mask=inside)
    centred = tl.where(inside, row - tl.sum(row, 0) / WIDTH, 0.0)
    deviation = tl.sqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    scaled = centred / deviation * (1.0 + tl.load(scale + columns, mask=inside, other=0.0))
    output = scaled + tl.load(shift + columns, mask=inside, other=0.0)
    tl.store(normed + places, output.to(normed.dtype.element_ty), mask=inside)


def residual_norm(
    hidden: Tensor, branch: Tensor | None, gate: Tensor, shift: Tensor, scale: Tensor, *, eps: float, dtype: torch.dtype
) -> Tensor:
    """`hidden += gate * branch` in place, then the adaptive norm of it (`dit.modulate`).

    Args:
        hidden: [R, H] fp32, the residual stream.
        branch: [R, H] what a layer adds; None for nothing.
        gate, shift, scale: [H] fp32.
        eps: of the norm.
        dtype: of the result.

    Returns:
        [R, H] in `dtype`.
    """
    rows, width = hidden.shape
    normed = torch.empty(rows, width, dtype=dtype, device=hidden.device)
    _residual_norm[(rows,)](
        hidden,
        hidden if branch is None else branch,
        gate,
        shift,
        scale,
        normed,
        eps,
        WIDTH=width,
        HAS_BRANCH=branch is not None,
        TILE=triton.next_power_of_2(width),
        num_warps=4,
    )
    return normed


@triton.jit
def _rotated_pairs(
    projected, cosines, sines, frames, loaded, is_rotated, STRIDE: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr
):
    """Even and odd dimensions [TILE, PAIRS] of one head's frames, rotated if this is the rotated head."""
    lanes = tl.arange(0, 2 * PAIRS)
    tile = tl.load(projected + frames[:, None] * STRIDE + lanes[None, :], mask=loaded[:, None], other=0.0)
    even, odd = tl.split(tl.reshape(tile.to(tl.float32), [TILE, PAIRS, 2]))
    angles = frames[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    cosine = tl.where(is_rotated, tl.load(cosines + angles, mask=loaded[:, None], other=1.0), 1.0)
    sine = tl.where(is_rotated, tl.load(sines + angles, mask=loaded[:, None], other=0.0), 0.0)
    return (
        (even * cosine - odd * sine).to(projected.dtype.element_ty),
        (odd * cosine + even * sine).to(projected.dtype.element_ty),
    )


@triton.jit
def _block_attention(
    qkv,
    cosines,
    sines,
    previous,
    following,
    valid,
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
):
    block, head = tl.program_id(0), tl.program_id(1)
    inner: tl.constexpr = HEADS * HEAD_DIM
    stride: tl.constexpr = 3 * inner
    places = tl.arange(0, TILE)
    lanes = tl.arange(0, HEAD_DIM)
    is_rotated = head < ROTARY_HEADS
    frames = block.to(tl.int64) * BLOCK + places
    of_head = qkv + head * HEAD_DIM
    query_even, query_odd = _rotated_pairs(
        of_head, cosines, sines, frames, places < BLOCK, is_rotated, stride, HEAD_DIM // 2, TILE
    )
    peak = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    output = tl.zeros([TILE, HEAD_DIM], tl.float32)
    for side in tl.static_range(-BACK, AHEAD + 1):
        # A neighbour that is not there is this block again with none of its frames valid.
        if side < 0:
            neighbour = tl.load(previous + block)
        elif side > 0:
            neighbour = tl.load(following + block)
        else:
            neighbour = block
        seen = tl.where(neighbour < 0, 0, tl.load(valid + tl.maximum(neighbour, 0)))
        keys = tl.maximum(neighbour, 0).to(tl.int64) * BLOCK + places
        loaded = places < seen
        key_even, key_odd = _rotated_pairs(
            of_head + inner, cosines, sines, keys, loaded, is_rotated, stride, HEAD_DIM // 2, TILE
        )
        value = tl.load(of_head + 2 * inner + keys[:, None] * stride + lanes[None, :], mask=loaded[:, None], other=0.0)
        if side < 0:
            page = tl.load(found + block)
            if page >= 0:
                # An earlier window's block lies before this one: its rows, instead of none.
                loaded = places < BLOCK
                left = pages + (page + tl.load(number)).to(tl.int64) * PAGE + head * HEAD_DIM
                key_even, key_odd = _rotated_pairs(
                    left, cosines_before, sines_before, places, loaded, is_rotated, 2 * inner, HEAD_DIM // 2, TILE
                )
                rows = left + inner + places[:, None] * 2 * inner + lanes[None, :]
                value = tl.load(rows, mask=loaded[:, None], other=0.0)
        scores = tl.dot(query_even, tl.trans(key_even), input_precision="ieee")
        scores += tl.dot(query_odd, tl.trans(key_odd), input_precision="ieee")
        scores = tl.where(loaded[None, :], scores * scale, -float("inf"))
        # -1e30 keeps rows that have seen no key yet from subtracting infinities.
        higher = tl.maximum(tl.maximum(peak, tl.max(scores, 1)), -1e30)
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(peak - higher)
        total = total * shrink + tl.sum(weights, 1)
        output = output * shrink[:, None]
        output += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        peak = higher
    output = output / tl.where(total > 0.0, total, 1.0)[:, None]
    target = mixed + frames[:, None] * inner + head * HEAD_DIM + lanes[None, :]
    tl.store(target, output.to(mixed.dtype.element_ty), mask=(places < BLOCK)[:, None])


def block_attention(
    qkv: Tensor,
    rotary: tuple[Tensor, Tensor],
    neighbours: Neighbours,
    reach: tuple[int, int],
    past: LayerPast | None,
    *,
    heads: int,
    rotary_heads: int,
) -> Tensor:
    """Rotary embedding and attention of every block over the blocks it can see (`attention.block_attention`).

    Args:
        qkv: [R, 3 x heads x head_dim], R = N x block rows of query, key and value side by side, not rotated.
        rotary: cosine and sine [R, head_dim / 2] fp32 of every row.
        neighbours: of the N blocks.
        reach: (look-back, look-ahead) in blocks, each 0 or 1.
        past: what a layer that looks back finds before blocks that have no previous one, in the dtype of `qkv`.
        heads: of them the first `rotary_heads` are rotated.

    Returns:
        [R, heads x head_dim] in the dtype of `qkv`.
    """
    rows, width = qkv.shape
    blocks = len(neighbours.previous)
    block_size = rows // blocks
    head_dim = width // (3 * heads)
    mixed = torch.empty(rows, width // 3, dtype=qkv.dtype, device=qkv.device)
    # Without look-back none of the past is read: any tensor will do.
    before = (qkv,) * 5
    if past is not None:
        before = (past.pages, past.found, past.number, past.rotary.cos, past.rotary.sin)
    _block_attention[(blocks, heads)](
        qkv,
        *rotary,
        neighbours.previous,
        neighbours.following,
        neighbours.valid_frames,
        *before,
        mixed,
        1.0 / math.sqrt(head_dim),
        PAGE=before[0].stride(0),
        HEADS=heads,
        HEAD_DIM=head_dim,
        ROTARY_HEADS=rotary_heads,
        BLOCK=block_size,
        TILE=max(SMALLEST_TILE, triton.next_power_of_2(block_size)),
        BACK=reach[0],
        AHEAD=reach[1],
        num_warps=2,
    )
    return mixed


@triton.jit
def _leave_past(
    qkv,
    pages,
    left,
    number,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    block, head = tl.program_id(0), tl.program_id(1)
    inner: tl.constexpr = HEADS * HEAD_DIM
    page = tl.load(left + block)
    if page >= 0:
        places = tl.arange(0, TILE)
        lanes = head * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        inside = (places < BLOCK)[:, None]
        source = qkv + (block.to(tl.int64) * BLOCK + places)[:, None] * 3 * inner + inner + lanes
        target = pages + (page + tl.load(number)).to(tl.int64) * PAGE + places[:, None] * 2 * inner + lanes
        tl.store(target, tl.load(source, mask=inside), mask=inside)
        tl.store(target + inner, tl.load(source + inner, mask=inside), mask=inside)


def leave_past(qkv: Tensor, past: LayerPast, *, heads: int) -> None:
    """Write the keys and values of the blocks that are left to later windows (`past.LayerPast.leave`).

    Args:
        qkv: [R, 3 x heads x head_dim], see `block_attention`, which must have been launched before.
        past: pages in the dtype of `qkv`.
        heads: of the attention.
    """
    rows, width = qkv.shape
    blocks = len(past.left)
    block_size = rows // blocks
    _leave_past[(blocks, heads)](
        qkv,
        past.pages,
        past.left,
        past.number,
        PAGE=past.pages.stride(0),
        HEADS=heads,
        HEAD_DIM=width // (3 * heads),
        BLOCK=block_size,
        TILE=triton.next_power_of_2(block_size),
        num_warps=2,
    )


SNAKE_FRAMES = 64
"""Input frames of a tile of the anti-aliased snake, of which the first and last five are its filters' margins."""
SNAKE_MARGIN = 5
_KEPT = SNAKE_FRAMES - 2 * SNAKE_MARGIN


@dataclass(frozen=True)
class SnakeFilters:
    """What one anti-aliased snake needs (`bigvgan.AntiAliasedSnake`); both filters as banded matrices of a tile."""

    up: Tensor
    """[128, 64]: frames of a tile to samples of the doubled rate; in the dtype of the filters' products."""
    down: Tensor
    """[64, 128]: back to the tile's kept frames; the last rows are zero."""
    down_sums: Tensor
    """[13] fp32: sums of the first 0, 1, ... taps of the filter that halves the rate."""
    frequency: Tensor
    """[C] fp32, exp(alpha)."""
    magnitude: Tensor
    """[C] fp32, 1 / exp(beta)."""

    @classmethod
    def of(
        cls, up: Tensor, down: Tensor, frequency: Tensor, magnitude: Tensor, dtype: torch.dtype = torch.float32
    ) -> SnakeFilters:
        """From the taps [12] of both filters, the gain of the first included.

        Products are in `dtype`: float32, which a tensor core takes by three products of TF32, or float16, which has
        as many bits of mantissa as TF32.
        """
        doubled = torch.arange(2 * SNAKE_FRAMES, device=up.device)
        frames = torch.arange(SNAKE_FRAMES, device=up.device)
        # Sample r of a tile lies at 2 start - margin + r, frame q at start - margin + q.
        backward = down * (frames < _KEPT)[:, None, None]
        return cls(
            up=_banded(up.expand(2 * SNAKE_FRAMES, 1, -1), doubled[:, None] + 2 * SNAKE_MARGIN - 2 * frames).to(dtype),
            down=_banded(backward, doubled - 2 * frames[:, None]).to(dtype),
            down_sums=F.pad(down.cumsum(0), (1, 0)),
            frequency=frequency,
            magnitude=magnitude,
        )


def _banded(taps: Tensor, numbers: Tensor) -> Tensor:
    """The matrix whose entries are the `numbers`-th of `taps` (by row), zero where there is none."""
    count = taps.shape[-1]
    chosen = taps.expand(*numbers.shape, count).gather(2, numbers.clamp(0, count - 1)[..., None])[..., 0]
    return torch.where((numbers >= 0) & (numbers < count), chosen, 0.0).contiguous()


@triton.jit
def _sine_squared(angle):
    """By the distance to the nearest multiple of pi and its Taylor polynomial, within 1e-7."""
    turn = angle * 0.3183098861837907
    turn -= tl.floor(turn + 0.5)
    square = turn * turn
    series = -0.0073704309 * square + 0.0821458866
    series = series * square - 0.5992645293
    series = series * square + 2.5501640399
    series = series * square - 5.1677127800
    series = series * square + 3.1415926536
    sine = series * turn
    return sine * sine


@triton.jit
def _anti_aliased_snake(
    first,
    second,
    bias,
    up_matrix,
    down_matrix,
    down_sums,
    frequency,
    magnitude,
    total,
    output,
    length,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_SECOND: tl.constexpr,
    STORES_TOTAL: tl.constexpr,
    FRAMES: tl.constexpr,
    MARGIN: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kept: tl.constexpr = FRAMES - 2 * MARGIN
    start = tl.program_id(0) * kept
    channels = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_channel = (channels < CHANNELS)[None, :]
    steps, doubled = tl.arange(0, FRAMES), tl.arange(0, 2 * FRAMES)
    times = start - MARGIN + steps
    within = tl.minimum(tl.maximum(times, 0), length - 1)
    row = tl.program_id(2).to(tl.int64) * length
    places = (row + within)[:, None] * CHANNELS + channels[None, :]
    value = tl.load(first + places, mask=is_channel, other=0.0).to(tl.float32)
    if HAS_SECOND:
        value += tl.load(second + places, mask=is_channel, other=0.0)
    value += tl.load(bias + channels, mask=channels < CHANNELS, other=0.0)[None, :]
    if STORES_TOTAL:
        own = (times >= start) & (times < start + kept) & (times < length)
        tl.store(total + places, value, mask=own[:, None] & is_channel)
    # Filters as matrices: tensor cores run them, and a sine is taken once a sample of the doubled rate.
    up = tl.load(up_matrix + doubled[:, None] * FRAMES + steps[None, :])
    fine = tl.dot(up, value.to(up.dtype), input_precision=PRECISION)
    angle = fine * tl.load(frequency + channels, mask=channels < CHANNELS, other=0.0)[None, :]
    fine += _sine_squared(angle) * tl.load(magnitude + channels, mask=channels < CHANNELS, other=0.0)[None, :]
    if (start == 0) | (start + kept > length - MARGIN):
        # A sample before the first or behind the last is that one again: it takes their taps too.
        sample = (2 * start - MARGIN + doubled)[None, :]
        tap = doubled[None, :] - 2 * steps[:, None]
        low = tl.maximum(tl.where(sample == 0, 0, tap), 0)
        high = tl.minimum(tl.where(sample == 2 * length - 1, TAPS - 1, tap), TAPS - 1)
        valid = (low <= high) & (sample >= 0) & (sample < 2 * length) & (steps < kept)[:, None]
        sums = tl.load(down_sums + high + 1, mask=valid, other=0.0) - tl.load(down_sums + low, mask=valid, other=0.0)
        down = sums.to(up.dtype)
    else:
        down = tl.load(down_matrix + steps[:, None] * 2 * FRAMES + doubled[None, :])
    coarse = tl.dot(down, fine.to(up.dtype), input_precision=PRECISION)
    target = start + steps
    stored = ((steps < kept) & (target < length))[:, None] & is_channel
    tl.store(
        output + (row + target)[:, None] * CHANNELS + channels[None, :],
        coarse.to(output.dtype.element_ty),
        mask=stored,
    )


def anti_aliased_snake(
    first: Tensor,
    second: Tensor | None,
    bias: Tensor,
    snake: SnakeFilters,
    *,
    dtype: torch.dtype,
    total: Tensor | None = None,
) -> Tensor:
    """`AntiAliasedSnake` of `first + second + bias`, channels last.

    Args:
        first: [B, T, C].
        second: [B, T, C] or None for zero.
        bias: [C] fp32.
        snake: filters and coefficients.
        dtype: of the result.
        total: [B, T, C] fp32, where the sum is kept as well.

    Returns:
        [B, T, C] in `dtype`.
    """
    batch, length, width = first.shape
    output = torch.empty(batch, length, width, dtype=dtype, device=first.device)
    tile = min(32, max(SMALLEST_TILE, triton.next_power_of_2(width)))
    _anti_aliased_snake[triton.cdiv(length, _KEPT), triton.cdiv(width, tile), batch](
        first,
        first if second is None else second,
        bias,
        snake.up,
        snake.down,
        snake.down_sums,
        snake.frequency,
        snake.magnitude,
        output if total is None else total,
        output,
        length,
        CHANNELS=width,
        TAPS=len(snake.down_sums) - 1,
        HAS_SECOND=second is not None,
        STORES_TOTAL=total is not None,
        FRAMES=SNAKE_FRAMES,
        MARGIN=SNAKE_MARGIN,
        TILE=tile,
        PRECISION="tf32x3" if dtype is torch.float32 else "tf32",
        num_warps=8,
    )
    return output


@triton.jit
def _standard_normal(counters, output, rows, CHANNELS: tl.constexpr, TILE: tl.constexpr):
    groups: tl.constexpr = (CHANNELS + 3) // 4
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row, group = place // groups, place % groups
    valid = row < rows
    frame = tl.load(counters + row, mask=valid, other=0).to(tl.uint32)
    low = tl.load(counters + rows + row, mask=valid, other=0).to(tl.uint64)
    high = tl.load(counters + 2 * rows + row, mask=valid, other=0).to(tl.uint64)
    zero = frame * 0
    first, second, third, fourth = tl.philox((high << 32) | low, frame, group.to(tl.uint32), zero, zero)
    target = output + row.to(tl.int64) * CHANNELS + group * 4
    for pair in tl.static_range(2):
        # Box-Muller; half a step above zero, so that the logarithm never sees 0.
        if pair == 0:
            size, turn = first, second
        else:
            size, turn = third, fourth
        radius = tl.sqrt(-2.0 * tl.log((size.to(tl.float64) + 0.5) / 4294967296.0))
        angle = 6.283185307179586 * (turn.to(tl.float64) / 4294967296.0)
        channel = group * 4 + 2 * pair
        tl.store(target + 2 * pair, (radius * tl.cos(angle)).to(tl.float32), mask=valid & (channel < CHANNELS))
        tl.store(target + 2 * pair + 1, (radius * tl.sin(angle)).to(tl.float32), mask=valid & (channel + 1 < CHANNELS))


def fused_standard_normal(spans: Sequence[tuple[int, int, int]], channels: int, device: torch.device) -> Tensor:
    """`noise.standard_normal` in one launch."""
    counted = counters(spans).to(device)
    rows = counted.shape[1]
    output = torch.empty(rows, channels, device=device)
    tile = 128
    _standard_normal[(triton.cdiv(rows * triton.cdiv(channels, 4), tile),)](
        counted, output, rows, CHANNELS=channels, TILE=tile, num_warps=4
    )
    return output
