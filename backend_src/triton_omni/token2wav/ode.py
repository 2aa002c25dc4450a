# SPDX-License-Identifier: Apache-2.0
"""The flow-matching ODE: time grid with sway, Euler and RK4 (3/8 rule) solvers, classifier-free guidance.

Pure functions of tensors, independent of the network. Times live on the host, so a solver never waits for the device.
Work is done in steps, between which its owner may do other work.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Mapping
from typing import Literal, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Yields between steps, and returns their result."""


def run_out(steps: Steps[T]) -> T:
    """Run all remaining steps, and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


GRIDS_KEPT = 4
"""Number of recent time grids that are cached; clients choose the options."""
Solver = Literal["rk4", "euler"]
Velocity = Callable[[int, Tensor], Tensor]
"""(number of the evaluation in `evaluation_times`, state) -> d state / d t."""


@functools.lru_cache(maxsize=GRIDS_KEPT)
def time_grid(num_steps: int, sway: float) -> Tensor:
    """Return the points [num_steps] fp32 on the host from 0 to 1 (HF: `Qwen2_5OmniToken2WavDiTModel.sample`).

    Cached, so not to be written to. A negative `sway` puts more points near 0, where the flow leaves the noise (F5-TTS,
    arXiv 2410.06885).
    """
    points = torch.linspace(0.0, 1.0, num_steps)
    return points + sway * (torch.cos(math.pi / 2 * points) - 1 + points)


def evaluation_times(grid: Tensor, solver: Solver) -> Tensor:
    """Return the times [E] of the evaluations of the velocity that `solver` makes on `grid`, in their order.

    The last evaluation of one rk4 step and the first of the next have the same time, but different states.
    """
    if solver == "euler":
        return grid[:-1].clone()
    start, step = grid[:-1], grid.diff()
    return torch.stack([start, start + step / 3, start + step * 2 / 3, grid[1:]], dim=1).flatten()


def integrate(velocity: Velocity, state: Tensor, grid: Tensor, solver: Solver) -> Steps[Tensor]:
    """Integrate `state` from the grid's first time to its last, one interval a step.

    The state has any shape; the result has its device and dtype. `velocity` is called with the number of the evaluation
    within `evaluation_times(grid, solver)`.
    """
    evaluations, take_step = EVALUATIONS_A_STEP[solver], STEPS[solver]
    for number, width in enumerate(grid.diff().tolist()):
        if number:
            yield
        state = take_step(functools.partial(_from, velocity, evaluations * number), width, state)
    return state


def _from(velocity: Velocity, first: int, number: int, state: Tensor) -> Tensor:
    return velocity(first + number, state)


def guide(conditional: Tensor, unconditional: Tensor, scale: Tensor | float) -> Tensor:
    """Apply classifier-free guidance: push the conditional velocity away from the unconditional one by `scale`."""
    return conditional + (conditional - unconditional) * scale


def euler_step(velocity: Velocity, width: float | Tensor, state: Tensor) -> Tensor:
    """Take one step of Euler's method; `velocity` is called with the number of the evaluation within the step."""
    return state + width * velocity(0, state)


def rk4_step(velocity: Velocity, width: float | Tensor, state: Tensor) -> Tensor:
    """Take one step of Kutta's 3/8 rule (HF: `RungeKutta4ODESolver`); its last time is the next step's first."""
    k1 = velocity(0, state)
    k2 = velocity(1, state + k1 * (width / 3))
    k3 = velocity(2, state + (k2 - k1 / 3) * width)
    k4 = velocity(3, state + (k1 - k2 + k3) * width)
    return state + (k1 + 3 * (k2 + k3) + k4) * (width / 8)


STEPS: Mapping[Solver, Callable[[Velocity, float | Tensor, Tensor], Tensor]] = {"rk4": rk4_step, "euler": euler_step}
EVALUATIONS_A_STEP: Mapping[Solver, int] = {"rk4": 4, "euler": 1}
