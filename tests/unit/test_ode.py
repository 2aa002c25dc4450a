# SPDX-License-Identifier: Apache-2.0
"""Time grid, solvers and guidance as formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from triton_omni.token2wav.ode import Solver, evaluation_times, guide, integrate, run_out, time_grid


def test_grid_without_sway_is_even() -> None:
    torch.testing.assert_close(time_grid(5, 0.0), torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]))


@pytest.mark.parametrize("sway", [-1.0, -0.4, 0.5])
def test_sway_keeps_the_ends_and_the_order(sway: float) -> None:
    grid = time_grid(10, sway)
    torch.testing.assert_close(grid[[0, -1]], torch.tensor([0.0, 1.0]))
    assert grid.diff().min() > 0


def test_negative_sway_is_one_minus_a_cosine() -> None:
    expected = torch.tensor([1 - math.cos(math.pi / 2 * n / 9) for n in range(10)])
    torch.testing.assert_close(time_grid(10, -1.0), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("solver", "count"), [("rk4", 36), ("euler", 9)])
def test_ten_points_need_this_many_evaluations(solver: Solver, count: int) -> None:
    grid = time_grid(10, -1.0)
    by_step = evaluation_times(grid, solver).view(9, -1)
    assert by_step.numel() == count
    assert torch.equal(by_step[:, 0], grid[:-1])
    assert torch.equal(by_step[:, -1], grid[1:] if solver == "rk4" else grid[:-1])
    assert (by_step.diff() > 0).all()


def exponential_error(solver: Solver, num_steps: int) -> float:
    """Error at 1 of x' = 2 t x, whose solution is exp(t^2)."""
    grid = torch.linspace(0, 1, num_steps, dtype=torch.float64)
    times = evaluation_times(grid, solver)

    def velocity(number: int, state: Tensor) -> Tensor:
        return 2 * times[number] * state

    return abs(float(run_out(integrate(velocity, torch.ones((), dtype=torch.float64), grid, solver))) - math.e)


@pytest.mark.parametrize(("solver", "order"), [("rk4", 4), ("euler", 1)])
def test_half_the_step_divides_the_error_by_two_to_the_order(solver: Solver, order: int) -> None:
    observed = math.log2(exponential_error(solver, 65) / exponential_error(solver, 129))
    assert observed == pytest.approx(order, abs=0.1)


def test_every_evaluation_is_asked_for_by_a_number_of_its_own() -> None:
    asked: list[int] = []

    def velocity(number: int, state: Tensor) -> Tensor:
        asked.append(number)
        return state

    run_out(integrate(velocity, torch.ones(2), time_grid(3, 0.0), "rk4"))
    assert asked == [0, 1, 2, 3, 4, 5, 6, 7]
    asked.clear()
    run_out(integrate(velocity, torch.ones(2), time_grid(3, 0.0), "euler"))
    assert asked == [0, 1]


def test_guidance_pushes_away_from_the_unconditional() -> None:
    conditional, unconditional = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0])
    torch.testing.assert_close(guide(conditional, unconditional, 0.5), torch.tensor([1.5, 1.0]))
    assert torch.equal(guide(conditional, unconditional, 0.0), conditional)
