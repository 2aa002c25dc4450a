# SPDX-License-Identifier: Apache-2.0
"""What a solver does between two evaluations of the velocity, in one launch, in the Triton language.

The arithmetic of `ode.py`, in float32; it knows no network.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_omni.token2wav.ode import EVALUATIONS_A_STEP, Solver

_TILE = 512


# Where a batch ends changes no code.
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
    """Where the evaluation behind the `number`-th of a step is made (`ode.rk4_step`, `ode.euler_step`).

    Args:
        velocity: what the `number`-th gave, [S, block, M] or, guided (`ode.guide`), [2 S, block, M] with the
            unconditional half behind the other.
        scale: fp32 [S, block, 1], of guidance; None without.
        width: fp32 [], the step's.
        state: fp32 [S, block, M], where the step begins; behind its last evaluation the step's end is written there.
        slopes: fp32 [evaluations of a step - 1, S, block, M], kept from one evaluation to the next.

    Returns:
        fp32 [S, block, M].
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
