# SPDX-License-Identifier: Apache-2.0
"""Parts of a thinker's decode step before and after the network, one launch each, in the Triton language.

They replace a dozen small launches, two of them on a GPU's copy engines, whose hand-over to the multiprocessors is slow
(`vllm_hooks/kernels/step_copy.py`). They know tensors alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024
"""Columns of a program."""
_AXES = 3


class Places(NamedTuple):
    """Positions of a decode step's tokens; the kernel advances all but `blocks` by one token."""

    positions: Tensor
    """int64 [B or more], places in their sequences."""
    axes: Tensor
    """int64 [3, B or more], M-RoPE positions."""
    lengths: Tensor
    """int32 [B or more], positions that attention reads."""
    slots: Tensor
    """int64 [B or more], slots in the cache of keys and values."""
    blocks: Tensor
    """int32 [B or more, blocks of the longest sequence], the cache's blocks of each."""
    block_size: int


class Uniforms(NamedTuple):
    """Uniform numbers that draw the ids after a step's tokens, float64 [B or more] each."""

    told: Tensor
    """In pinned memory of the host."""
    target: Tensor
    """On the device, overwritten."""


@triton.jit
def _begin_step(
    drawn,
    table,
    inputs,
    positions,
    axes,
    lengths,
    slots,
    blocks,
    told,
    uniforms,
    axis_stride,
    block_stride,
    AXES: tl.constexpr,
    BLOCK: tl.constexpr,
    DRAWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < WIDTH
    id = tl.load(drawn + token).to(tl.int64)
    tl.store(inputs + token * WIDTH + columns, tl.load(table + id * WIDTH + columns, mask=inside), mask=inside)
    if tl.program_id(1) == 0:
        place = tl.load(positions + token) + 1
        tl.store(positions + token, place)
        tl.store(lengths + token, tl.load(lengths + token) + 1)
        for axis in tl.static_range(AXES):
            along = axes + axis * axis_stride + token
            tl.store(along, tl.load(along) + 1)
        block = tl.load(blocks + token * block_stride + place // BLOCK).to(tl.int64)
        tl.store(slots + token, block * BLOCK + place % BLOCK)
        if DRAWS:
            tl.store(uniforms + token, tl.load(told + token))


def begin_step(drawn: Tensor, table: Tensor, inputs: Tensor, places: Places, uniforms: Uniforms | None) -> None:
    """Lay out a step of one token a sequence, after the ids that the sequences drew.

    Args:
        drawn: int32 [B].
        table: [V, H], embeddings of ids.
        inputs: [B or more, H], of the same dtype; overwritten.
        places: of the step before.
        uniforms: of this step; None = nothing is drawn by them.
    """
    count, width = drawn.shape[0], table.shape[1]
    _begin_step[(count, triton.cdiv(width, _TILE))](
        drawn,
        table,
        inputs,
        places.positions,
        places.axes,
        places.lengths,
        places.slots,
        places.blocks,
        places.positions if uniforms is None else uniforms.told,
        places.positions if uniforms is None else uniforms.target,
        places.axes.stride(0),
        places.blocks.stride(0),
        AXES=_AXES,
        BLOCK=places.block_size,
        DRAWS=uniforms is not None,
        WIDTH=width,
        TILE=_TILE,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["count"])
def _finish(hidden, rows, finite, table, slots, count, KEEPS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0)
    columns = tl.arange(0, TILE)
    inside = columns < WIDTH
    at = token.to(tl.int64) * WIDTH + columns
    state = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32)
    # No comparison with NaN is true.
    tl.store(finite + token, tl.min((tl.abs(state) < float("inf")).to(tl.int32), 0) != 0)
    if token < count:
        row = tl.load(rows + at, mask=inside, other=0.0).to(tl.float32) + state
        tl.store(rows + at, row.to(rows.dtype.element_ty), mask=inside)
        if KEEPS:
            kept = tl.load(slots + token) * WIDTH + columns
            tl.store(table + kept, row.to(rows.dtype.element_ty), mask=inside)


def finish(rows: Tensor | None, hidden: Tensor, kept: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """`hidden_rows.finish` by one kernel, which writes to the host's memory itself."""
    width, host = hidden.shape[1], torch.empty(hidden.shape[0], dtype=torch.bool, pin_memory=hidden.is_cuda)
    count = 0 if rows is None else rows.shape[0]
    target = hidden if rows is None else rows
    table, slots = (target, target) if kept is None else kept
    _finish[(hidden.shape[0],)](
        hidden.contiguous(),
        target,
        host,
        table,
        slots,
        count,
        KEEPS=kept is not None,
        WIDTH=width,
        TILE=triton.next_power_of_2(width),
        num_warps=8,
    )
    return host
