# SPDX-License-Identifier: Apache-2.0
"""Fused kernels of the solver in the Triton language: its initial condition, and the work between two evaluations.

They compute `sampler.condition` and `ode.py` in float32, independent of the network.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_omni.token2wav.batching import BlockLayout
from triton_omni.token2wav.ode import EVALUATIONS_A_STEP, Solver

_TILE = 512


# The layout of a batch does not change the code.
@triton.jit(do_not_specialize=["half"])
def _condition(
    codes,
    spoken,
    voices,
    windows,
    output,
    half,
    VOICE: tl.constexpr,
    HALVES: tl.constexpr,
    REPEATS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < WIDTH
    code = tl.load(codes + row // REPEATS).to(tl.int64)
    voice = voices + tl.load(windows + row) * VOICE + at
    target = output + row.to(tl.int64) * WIDTH + at
    said = tl.load(spoken + code * WIDTH + at, mask=inside, other=0.0)
    tl.store(target, tl.load(voice, mask=inside, other=0.0) + said, mask=inside)
    if HALVES > 1:
        tl.store(target + half, tl.load(voice + WIDTH, mask=inside, other=0.0), mask=inside)


def fused_condition(codes: Tensor, spoken: Tensor, voices: Tensor, layout: BlockLayout) -> Tensor:
    """Compute `sampler.condition` in one launch."""
    rows, (_, halves, width) = len(layout.windows), voices.shape
    output = torch.empty(halves, rows, width, device=voices.device)
    _condition[(rows, triton.cdiv(width, _TILE))](
        codes,
        spoken,
        voices,
        layout.windows,
        output,
        output.stride(0),
        VOICE=voices.stride(0),
        HALVES=halves,
        REPEATS=rows // len(codes),
        WIDTH=width,
        TILE=_TILE,
        num_warps=4,
    )
    return output


# The end of a batch does not change the code.
@triton.jit(do_not_specialize=["count"])
def _advance(
    velocity,
    scale,
    width,
    state,
    slopes,
    target,
    count,
    CHANNELS: tl.constexpr,
    NUMBER: tl.constexpr,
    EVALUATIONS: tl.constexpr,
    GUIDED: tl.constexpr,
    TILE: tl.constexpr,
):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < count
    slope = tl.load(velocity + at, mask=inside, other=0.0).to(tl.float32)
    if GUIDED:
        unconditional = tl.load(velocity + count + at, mask=inside, other=0.0).to(tl.float32)
        slope += (slope - unconditional) * tl.load(scale + at // CHANNELS, mask=inside, other=0.0)
    step = tl.load(width)
    begin = tl.load(state + at, mask=inside, other=0.0)
    if EVALUATIONS == 1:
        end = begin + step * slope
    elif NUMBER == 0:
        end = begin + slope * (step / 3)
    else:
        first = tl.load(slopes + at, mask=inside, other=0.0)
        if NUMBER == 1:
            end = begin + (slope - first / 3) * step
        else:
            second = tl.load(slopes + count + at, mask=inside, other=0.0)
            if NUMBER == 2:
                end = begin + (first - second + slope) * step
            else:
                third = tl.load(slopes + 2 * count + at, mask=inside, other=0.0)
                end = begin + (first + 3 * (second + third) + slope) * (step / 8)
    if NUMBER < EVALUATIONS - 1:
        tl.store(slopes + NUMBER * count + at, slope, mask=inside)
    tl.store(target + at, end, mask=inside)


def advance(
    velocity: Tensor, scale: Tensor | None, width: Tensor, state: Tensor, slopes: Tensor, *, solver: Solver, number: int
) -> Tensor:
    """Return the state for the evaluation after the `number`-th of a step (`ode.rk4_step`, `ode.euler_step`).

    Args:
        velocity: result of the `number`-th evaluation, [S, M] or, under guidance (`ode.guide`), [2 S, M]
            with the unconditional half second.
        scale: fp32 [S, 1], guidance scale; None without guidance.
        width: fp32 [], the step's width.
        state: fp32 [S, M], the step's start; the last evaluation overwrites it with the step's end.
        slopes: fp32 [evaluations of a step - 1, S, M], kept from one evaluation to the next.

    Returns:
        fp32 [S, M].
    """
    evaluations = EVALUATIONS_A_STEP[solver]
    target = state if number == evaluations - 1 else torch.empty_like(state)
    count = state.numel()
    _advance[(triton.cdiv(count, _TILE),)](
        velocity,
        width if scale is None else scale,
        width,
        state,
        slopes,
        target,
        count,
        CHANNELS=state.shape[-1],
        NUMBER=number,
        EVALUATIONS=evaluations,
        GUIDED=scale is not None,
        TILE=_TILE,
        num_warps=4,
    )
    return target
