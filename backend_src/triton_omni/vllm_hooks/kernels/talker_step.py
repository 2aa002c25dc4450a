# SPDX-License-Identifier: Apache-2.0
"""Part of a talker's decode step before the network, in one launch, in the Triton language.

It computes what `TalkerStep`'s plain operations do in some forty small launches, for one token a sequence.
`vllm_hooks/kernels/talker_draw.py` has the part after the network. It knows the step's tensors, neither vLLM nor how a
step is scheduled.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_omni.core.kernel_launch import early_launch, wait_for_inputs
from triton_omni.vllm_hooks.talker.rows import Column


class Layout(NamedTuple):
    """Inputs of a step, and the buffers that it fills."""

    told: Tensor
    """int64 [N, len(Column)]."""
    ids: Tensor
    """int32 [N], read, and overwritten where a token follows."""
    positions: Tensor
    """int64 [3, N], overwritten there too."""
    cache_slots: Tensor
    """int64 [N], overwritten there too."""


class Memory(NamedTuple):
    """State of each sequence by slot, and state of all."""

    pool: Tensor
    """[rows, H], hidden rows."""
    used: Tensor
    """int32 [slots, V], how often each id was read."""
    faults: Tensor
    """int32 [slots], how often a row that is not finite was read."""
    drawn: Tensor
    """int32 [most sequences], the last step's draws, in its order of sequences."""


@triton.jit
def _begin_step(
    index,
    ids,
    positions,
    cache_slots,
    drawn,
    pool,
    table,
    used,
    faults,
    inputs,
    index_stride,
    axis_stride,
    mask_id,
    ROW: tl.constexpr,
    SLOT: tl.constexpr,
    FOLLOWS: tl.constexpr,
    AXIS: tl.constexpr,
    CACHE: tl.constexpr,
    WIDTH: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    token = tl.program_id(0)
    told = index + token * index_stride
    code = tl.load(ids + token)
    if tl.load(told + FOLLOWS) != 0:
        code = tl.load(drawn + token)
        position = tl.load(told + AXIS)
        tl.store(ids + token, code)
        tl.store(positions + token, position)
        tl.store(positions + axis_stride + token, position)
        tl.store(positions + 2 * axis_stride + token, position)
        tl.store(cache_slots + token, tl.load(told + CACHE))
    slot = tl.load(told + SLOT)
    # One program uses each slot; only the idle slot is shared, and its values do not count.
    times = used + slot * VOCABULARY + code
    tl.store(times, tl.load(times) + 1)
    columns = tl.arange(0, TILE)
    inside = columns < WIDTH
    row = tl.load(pool + tl.load(told + ROW) * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    # A sum is finite only where every term is.
    finite = tl.abs(tl.sum(row, 0)) < float("inf")
    if finite == 0:
        tl.atomic_add(faults + slot, 1)
    row = tl.where(tl.abs(row) < float("inf"), row, 0.0)
    embedded = tl.load(table + code.to(tl.int64) * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    total = row + tl.where(code == mask_id, 0.0, embedded)
    tl.store(inputs + token * WIDTH + columns, total.to(inputs.dtype.element_ty), mask=inside)


def begin_step(layout: Layout, memory: Memory, table: Tensor, mask_id: int) -> Tensor:
    """`TalkerStep.begin_decode`: return inputs [N, H] of a decode step's tokens, and lay out those that follow.

    Args:
        layout, memory: of the step.
        table: [V, H], embeddings of codec ids.
        mask_id: the id whose embedding is not added.
    """
    count, width = len(layout.ids), memory.pool.shape[1]
    inputs = torch.empty(count, width, dtype=memory.pool.dtype, device=memory.pool.device)
    _begin_step[(count,)](
        *layout,
        memory.drawn,
        memory.pool,
        table,
        memory.used,
        memory.faults,
        inputs,
        layout.told.stride(0),
        layout.positions.stride(0),
        mask_id,
        ROW=Column.ROW.value,
        SLOT=Column.SLOT.value,
        FOLLOWS=Column.FOLLOWS.value,
        AXIS=Column.AXIS.value,
        CACHE=Column.CACHE.value,
        WIDTH=width,
        VOCABULARY=memory.used.shape[1],
        TILE=triton.next_power_of_2(width),
        num_warps=8,
        **early_launch(inputs.device),
    )
    return inputs
