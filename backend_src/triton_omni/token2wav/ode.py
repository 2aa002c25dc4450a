# SPDX-License-Identifier: Apache-2.0
"""The flow-matching ODE: time grid with sway, Euler and RK4 (3/8 rule) solvers, classifier-free guidance.

Pure functions of tensors; knows nothing of the network. Times live on the host, so a solver never waits
for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Solver = Literal["rk4", "euler"]
Velocity = Callable[[int, Tensor], Tensor]
"""(number of the time in `evaluation_times`, state) -> d state / d t."""


def time_grid(num_steps: int, sway: float) -> Tensor:
    """Points [num_steps] fp32 on the host from 0 to 1 (HF: `Qwen2_5OmniToken2WavDiTModel.sample`).

    A negative `sway` puts more points near 0, where the flow leaves the noise (F5-TTS, arXiv 2410.06885).
    """
    points = torch.linspace(0.0, 1.0, num_steps)
    return points + sway * (torch.cos(math.pi / 2 * points) - 1 + points)


def evaluation_times(grid: Tensor, solver: Solver) -> Tensor:
    """The distinct times [E] at which `solver` evaluates the velocity on `grid`; E is known before solving."""
    if solver == "euler":
        return grid[:-1].clone()
    start, step = grid[:-1], grid.diff()
    inner = torch.stack([start, start + step / 3, start + step * 2 / 3], dim=1).flatten()
    return torch.cat([inner, grid[-1:]])


def integrate(velocity: Velocity, state: Tensor, grid: Tensor, solver: Solver) -> Tensor:
    """Carry `state` from the grid's first time to its last; any shape, the state's own device and dtype.

    `velocity` is asked by the number of the time within `evaluation_times(grid, solver)`.
    """
    step = _rk4_step if solver == "rk4" else _euler_step
    for number, width in enumerate(grid.diff().tolist()):
        state = step(velocity, number, width, state)
    return state


def guide(conditional: Tensor, unconditional: Tensor, scale: Tensor | float) -> Tensor:
    """Classifier-free guidance: the conditional velocity, pushed away from the unconditional by `scale`."""
    return conditional + (conditional - unconditional) * scale


def _euler_step(velocity: Velocity, number: int, width: float, state: Tensor) -> Tensor:
    return state + width * velocity(number, state)


def _rk4_step(velocity: Velocity, number: int, width: float, state: Tensor) -> Tensor:
    """Kutta's 3/8 rule (HF: `RungeKutta4ODESolver`)."""
    first = 3 * number
    k1 = velocity(first, state)
    k2 = velocity(first + 1, state + k1 * (width / 3))
    k3 = velocity(first + 2, state + (k2 - k1 / 3) * width)
    k4 = velocity(first + 3, state + (k1 - k2 + k3) * width)
    return state + (k1 + 3 * (k2 + k3) + k4) * (width / 8)
