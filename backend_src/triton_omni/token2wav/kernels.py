# SPDX-License-Identifier: Apache-2.0
"""Fused kernels of token2wav in the Triton language; plain PyTorch needs many small launches for each.

Each kernel computes the same as one plain function or module, named in its wrapper. All accumulate in float32, whatever
dtype they read and write. Independent of windows and streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from triton_omni.core.gpu import to_device
from triton_omni.core.kernel_launch import early_launch, let_next_begin, padded_rows, wait_for_inputs
from triton_omni.token2wav.noise import counters


@triton.jit
def _residual_norm(
    hidden,
    branch,
    gate,
    shift,
    scale,
    normed,
    eps,
    part_stride,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    columns = tl.arange(0, TILE)
    inside = columns < WIDTH
    gates = tl.load(gate + columns, mask=inside, other=0.0)
    scales = 1.0 + tl.load(scale + columns, mask=inside, other=0.0)
    shifts = tl.load(shift + columns, mask=inside, other=0.0)
    places = tl.program_id(0).to(tl.int64) * WIDTH + columns

    wait_for_inputs(EARLY)
    row = tl.load(hidden + places, mask=inside, other=0.0)
    if PARTS > 0:
        added = tl.load(branch + places, mask=inside, other=0.0).to(tl.float32)
        # Unrolled, so that all parts are on their way at once.
        for part in tl.static_range(1, PARTS):
            added += tl.load(branch + part * part_stride + places, mask=inside, other=0.0)
        row += gates * added
        tl.store(hidden + places, row, mask=inside)
    centred = tl.where(inside, row - tl.sum(row, 0) / WIDTH, 0.0)
    deviation = tl.sqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    output = centred / deviation * scales + shifts
    tl.store(normed + places, output.to(normed.dtype.element_ty), mask=inside)


def residual_norm(
    hidden: Tensor,
    branch: Tensor | None,
    gate: Tensor,
    shift: Tensor,
    scale: Tensor,
    *,
    eps: float,
    dtype: torch.dtype,
    early: bool = False,
) -> Tensor:
    """Compute `hidden += gate * branch` in place, then its adaptive norm (`dit.modulate`).

    Args:
        hidden: [R, H] fp32, the residual stream.
        branch: [R, H] what a layer adds, or [S, R, H] fp32, whose sum it adds; None for nothing.
        gate, shift, scale: [H] fp32.
        eps: of the norm.
        dtype: of the result.
        early: see `early_launch`.

    Returns:
        [R, H] in `dtype`.
    """
    rows, width = hidden.shape
    normed = torch.empty(rows, width, dtype=dtype, device=hidden.device)
    parts = 0 if branch is None else len(branch) if branch.ndim > hidden.ndim else 1
    _residual_norm[(rows,)](
        hidden,
        hidden if branch is None else branch,
        gate,
        shift,
        scale,
        normed,
        eps,
        hidden.numel(),
        WIDTH=width,
        PARTS=parts,
        TILE=triton.next_power_of_2(width),
        num_warps=8,
        **early_launch(hidden.device, early=early),
    )
    return normed


SNAKE_FRAMES = 64
"""Input frames of a tile of the anti-aliased snake; the first and last five are margins of its filters."""
SNAKE_MARGIN = 5
_KEPT = SNAKE_FRAMES - 2 * SNAKE_MARGIN
_SNAKE_CHANNELS = 64
"""Channels of a tile, which share one load of the filters; the fastest of 16 to 128 (docs/benchmarks-history.md)."""


@dataclass(frozen=True)
class SnakeFilters:
    """Filters and coefficients of one anti-aliased snake (`bigvgan.AntiAliasedSnake`); both filters are banded matrices
    of a tile.
    """

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
        """Build them from the taps [12] of both filters, the gain of the first included.

        Products are in `dtype`. Tensor cores compute float32 by three products of TF32; float16 has as many bits of
        mantissa as TF32.
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
    """Return the matrix whose entries are the `numbers`-th of `taps` (by row), zero where there is none."""
    count = taps.shape[-1]
    chosen = taps.expand(*numbers.shape, count).gather(2, numbers.clamp(0, count - 1)[..., None])[..., 0]
    return torch.where((numbers >= 0) & (numbers < count), chosen, 0.0).contiguous()


@triton.jit
def _sine_squared(angle):
    """Compute it from the distance to the nearest multiple of pi by a Taylor polynomial, within 1e-7."""
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


# Channels are contiguous, so the compiled code does not depend on divisibility of the length by 16. Specialised for it,
# the end of a reply would compile again and delay every stream by a quarter of a second a kernel.
@triton.jit(do_not_specialize=["length"])
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
        # A sample before the first or after the last repeats that one, which therefore takes their taps too.
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
    places = (row + target)[:, None] * CHANNELS + channels[None, :]
    tl.store(output + places, coarse.to(output.dtype.element_ty), mask=stored)


def anti_aliased_snake(
    first: Tensor,
    second: Tensor | None,
    bias: Tensor,
    snake: SnakeFilters,
    *,
    dtype: torch.dtype,
    total: Tensor | None = None,
) -> Tensor:
    """Compute `AntiAliasedSnake` of `first + second + bias`, channels last.

    Args:
        first: [B, T, C].
        second: [B, T, C] or None for zero.
        bias: [C] fp32.
        snake: filters and coefficients.
        dtype: of the result.
        total: [B, T, C], where the sum is kept as well.

    Returns:
        [B, T, C] in `dtype`.
    """
    batch, length, width = first.shape
    output = torch.empty(batch, length, width, dtype=dtype, device=first.device)
    # Filters in float32 take twice the shared memory, and too many registers with larger tiles.
    most, warps = (_SNAKE_CHANNELS, 4) if snake.up.dtype is torch.float16 else (32, 8)
    tile = min(most, padded_rows(width))
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
        num_warps=warps,
    )
    return output


@triton.jit(do_not_specialize=["count"])
def _mean_of_sums(firsts, seconds, biases, output, count, CHANNELS: tl.constexpr, TILE: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = places < count
    channels = places % CHANNELS
    total = tl.zeros((TILE,), tl.float32)
    for part in tl.static_range(len(firsts)):
        total += tl.load(firsts[part] + places, mask=inside, other=0.0)
        total += tl.load(seconds[part] + places, mask=inside, other=0.0)
        total += tl.load(biases[part] + channels, mask=inside, other=0.0)
    tl.store(output + places, (total / len(firsts)).to(output.dtype.element_ty), mask=inside)


def mean_of_sums(parts: Sequence[tuple[Tensor, Tensor, Tensor]], dtype: torch.dtype) -> Tensor:
    """Compute the mean of `first + second + bias` over parts.

    Args:
        parts: first and second [B, T, C], bias [C] fp32.
        dtype: of the result.

    Returns:
        [B, T, C] in `dtype`.
    """
    firsts, seconds, biases = zip(*parts, strict=True)
    output = torch.empty_like(firsts[0], dtype=dtype)
    tile = 1024
    _mean_of_sums[(triton.cdiv(output.numel(), tile),)](
        firsts, seconds, biases, output, output.numel(), CHANNELS=output.shape[-1], TILE=tile, num_warps=4
    )
    return output


@triton.jit(do_not_specialize=["rows"])
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
    """Compute `noise.standard_normal` in one launch."""
    counted = to_device(counters(spans), device)
    rows = counted.shape[1]
    output = torch.empty(rows, channels, device=device)
    tile = 128
    _standard_normal[(triton.cdiv(rows * triton.cdiv(channels, 4), tile),)](
        counted, output, rows, CHANNELS=channels, TILE=tile, num_warps=4
    )
    return output
