# SPDX-License-Identifier: Apache-2.0
"""Matrix products of a decode step with their neighbouring operations, in the Triton language.

For a few tokens a product is bound by reading its weights and by the latency of walking its depth. All multiprocessors
must read all the time, and neighbouring operations must cost no launches of their own. Sums are in float32. It knows
tensors, neither vLLM nor the networks.

Weights may be E4M3 with a float32 scale a row. They are converted in registers, without loss, and their sums are
scaled: the rows keep their own precision (weight-only quantisation).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_omni.core.kernel_launch import early_launch, let_next_begin, padded_rows, wait_for_inputs

_NARROW = 1024
"""Hidden states of a talker, whose products fill no GPU."""
_COLUMNS = 64
"""Columns of one program: as many lines of weights as Hopper's tensor cores take at once."""
_GATED_COLUMNS = 32
"""Columns of each of two matrices."""
_STRIDE = 128
"""Depth at a time."""
_E4M3_STRIDE = 256
"""Depth at a time of weights that are half as large: as many bytes."""
_STAGES = 4
"""Tiles in flight, one more than a wait covers."""
_E4M3_STAGES = {16: 5, 32: 4, 64: 3}
"""The same for E4M3, by rows: they fit into 99 KB of shared memory, and twice into Hopper's 228 KB (64 rows once)."""
_MOST_PARTS = 16
"""Maximum parts of a product whose depth is split."""
_ENOUGH_PROGRAMS = 132
"""One a multiprocessor of the largest GPUs; more of them leave more parts to be added up."""


def most_rows(width: int) -> int:
    """Maximum tokens of a step that uses these products, for hidden states of this width.

    More are faster by a library: of 7B's wide thinker 64 took 1.1 to 1.3 times as long, of its narrow talker half.
    """
    return 64 if width <= _NARROW else 32


def reads_e4m3(device: torch.device) -> bool:
    """True if the products read E4M3 on a device: from Hopper on.

    Before it there is no copy engine, and threads that fetch such tiles themselves run out of registers.
    """
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def _converted(weights, kind: tl.constexpr):
    # Through float32, two numbers an instruction: from float16, which E4M3 first becomes, it would be one.
    return weights.to(tl.float32).to(kind)


@triton.jit
def _swiglu(gate, up, kind: tl.constexpr):
    # Rounded where the plain path has a tensor.
    gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate)) * up).to(kind)


@triton.jit
def _gated_product(
    rows,
    weights,
    output,
    count,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    row, column = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
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
    gated = _swiglu(gate, up, output.dtype.element_ty)
    tl.store(output + row[:, None] * WIDTH + column[None, :], gated, mask=wanted & inside)


@triton.jit
def _scaled_gated_product(
    rows,
    weights,
    scales,
    output,
    count,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    first = tl.program_id(0) * COLUMNS
    summed = tl.zeros([2 * COLUMNS, ROWS], tl.float32)
    for at in range(0, DEPTH, STRIDE):
        ours = rows.load([0, at])
        # Lines of both matrices in one product, on the left as in `_split_product`: no number is converted twice.
        theirs = weights.load([0, first, at]).reshape(2 * COLUMNS, STRIDE)
        summed = tl.dot(_converted(theirs, ours.dtype), ours.T, summed, input_precision="ieee")
    gate, up = tl.split(summed.reshape(2, COLUMNS, ROWS).permute(1, 2, 0))
    row, column = tl.arange(0, ROWS), first + tl.arange(0, COLUMNS)
    wanted, inside = (row < count)[None, :], column < WIDTH
    gate *= tl.load(scales + column, mask=inside, other=0.0)[:, None]
    up *= tl.load(scales + WIDTH + column, mask=inside, other=0.0)[:, None]
    gated = _swiglu(gate, up, output.dtype.element_ty)
    tl.store(output + row[None, :] * WIDTH + column[:, None], gated, mask=wanted & inside[:, None])


def gated_product(rows: Tensor, weights: Tensor, scales: Tensor | None = None) -> Tensor:
    """SwiGLU's first half, `silu(gate) * up` [M, I], of `rows` [M, K] and `weights` [2 I, K]: all gates, then the rest.

    With `scales` [2 I] fp32, `weights` are E4M3 and K is a multiple of 16. All are contiguous.

    Source: Shazeer, GLU Variants Improve Transformer (2020); HF's `Qwen2MLP`.
    """
    (count, depth), width = rows.shape, len(weights) // 2
    output, tile = torch.empty(count, width, dtype=rows.dtype, device=rows.device), padded_rows(count)
    if scales is not None:
        _scaled_gated_product[(triton.cdiv(width, _GATED_COLUMNS),)](
            TensorDescriptor.from_tensor(rows, [tile, _E4M3_STRIDE]),
            TensorDescriptor.from_tensor(weights.view(2, width, depth), [2, _GATED_COLUMNS, _E4M3_STRIDE]),
            scales,
            output,
            count,
            WIDTH=width,
            DEPTH=depth,
            ROWS=tile,
            COLUMNS=_GATED_COLUMNS,
            STRIDE=_E4M3_STRIDE,
            num_warps=4,
            num_stages=_E4M3_STAGES[tile],
            **early_launch(rows.device),
        )
        return output
    _gated_product[(triton.cdiv(width, _GATED_COLUMNS),)](
        rows,
        weights,
        output,
        count,
        WIDTH=width,
        DEPTH=depth,
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
def _split_product(
    rows,
    weights,
    scales,
    parts,
    count,
    WIDTH: tl.constexpr,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    part, row, first = tl.program_id(1), tl.arange(0, ROWS), tl.program_id(0) * COLUMNS
    summed = tl.zeros([COLUMNS, ROWS], tl.float32)
    # The same count for every part: where a loop may not run at all, ptxas makes each step of the tensor cores wait for
    # the one before (its warning C7515).
    for step in range(SHARE // STRIDE):
        at = part * SHARE + step * STRIDE
        ours, theirs = rows.load([0, at]), weights.load([first, at])
        if scales is not None:
            theirs = _converted(theirs, ours.dtype)
        # Weights are on the left: there Hopper's tensor cores take 64 lines of them at once, from shared memory or, if
        # they were converted, from registers.
        summed = tl.dot(theirs, ours.T, summed, input_precision="ieee")
    column = first + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    if scales is not None:
        summed *= tl.load(scales + column, mask=inside, other=0.0)[:, None]
    wanted = inside[:, None] & (row < count)[None, :]
    tl.store(parts + (part * count + row[None, :]) * WIDTH + column[:, None], summed, mask=wanted)


def shares(width: int, depth: int, stride: int = _STRIDE) -> tuple[int, int]:
    """Return the number of programs that share a product's depth ([M, depth] x [depth, width]), and the depth of each.

    Each takes whole strides.
    """
    wanted = min(_MOST_PARTS, triton.cdiv(_ENOUGH_PROGRAMS, triton.cdiv(width, _COLUMNS)))
    share = triton.cdiv(triton.cdiv(depth, stride), wanted) * stride
    return triton.cdiv(depth, share), share


def split_product(rows: Tensor, weights: Tensor, scales: Tensor | None = None, *, early: bool = True) -> Tensor:
    """Parts [S, M, N] fp32 whose sum is `rows` [M, K] times the transpose of `weights` [N, K]; all contiguous.

    A library gives each program a tile of the output, but a narrow output has fewer tiles than the GPU has
    multiprocessors. Here several programs share a tile's depth (split-K), and the reader adds their parts up. Lines of
    both matrices are multiples of 16 bytes, as Hopper's copy engine needs. With `scales` [N] fp32, `weights` are E4M3.
    Without `early`, the product begins after all earlier launches have ended, and so does every later launch.
    """
    (count, depth), width, tile = rows.shape, len(weights), padded_rows(len(rows))
    stride, stages = (_STRIDE, _STAGES) if scales is None else (_E4M3_STRIDE, _E4M3_STAGES[tile])
    parts, share = shares(width, depth, stride)
    output = torch.empty(parts, count, width, dtype=torch.float32, device=rows.device)
    _split_product[(triton.cdiv(width, _COLUMNS), parts)](
        TensorDescriptor.from_tensor(rows, [tile, stride]),
        TensorDescriptor.from_tensor(weights, [_COLUMNS, stride]),
        scales,
        output,
        count,
        WIDTH=width,
        SHARE=share,
        ROWS=tile,
        COLUMNS=_COLUMNS,
        STRIDE=stride,
        num_warps=4,
        num_stages=stages,
        **early_launch(rows.device, early=early),
    )
    return output


@triton.jit
def _add_norm(
    parts,
    bias,
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
    let_next_begin(EARLY)
    columns = tl.arange(0, TILE)
    inside = columns < WIDTH
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    at = tl.program_id(0).to(tl.int64) * WIDTH + columns

    wait_for_inputs(EARLY)
    if bias is None:
        total = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    else:
        total = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    # Unrolled, so that all parts are loaded at once.
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * part_stride + at, mask=inside, other=0.0)
    rounded = total.to(residual.dtype.element_ty)
    tl.store(residual + at, rounded, mask=inside)
    total = rounded.to(tl.float32)
    scaled = total * tl.rsqrt(tl.sum(total * total, 0) / WIDTH + eps)
    kind = normed.dtype.element_ty
    tl.store(normed + at, scaled.to(kind) * gain, mask=inside)


def add_norm(parts: Tensor, residual: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    """Add the sum of `parts` [S, M, N] fp32 (`split_product`) to `residual` [M, N] in place; gives its RMS norm [M, N].

    Args:
        weight: [N] of the norm.
        eps: of the norm.
        bias: [N]; replaces the residual, whose old values are not read.
    """
    count, width = residual.shape
    normed = torch.empty_like(residual)
    _add_norm[(count,)](
        parts,
        bias,
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
