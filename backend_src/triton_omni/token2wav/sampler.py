# SPDX-License-Identifier: Apache-2.0
"""Sampling of mel frames for windows of codes: noise, conditioning, guidance and solver around the DiT, in a ragged
batch.

The same as HF's `Qwen2_5OmniToken2WavDiTModel.sample` on each window's codes, given the same noise. Independent of
streams; nothing in the solver's loop waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from triton_omni.core.gpu import to_device
from triton_omni.core.settings import DiffusionSettings
from triton_omni.token2wav.batching import LAYOUTS_KEPT, BlockLayout, block_layout
from triton_omni.token2wav.dit import DiT, Voice
from triton_omni.token2wav.noise import standard_normal
from triton_omni.token2wav.ode import (
    EVALUATIONS_A_STEP,
    GRIDS_KEPT,
    Solver,
    Steps,
    Velocity,
    evaluation_times,
    guide,
    integrate,
    run_out,
    time_grid,
)
from triton_omni.token2wav.window_cache import HostWindowKVCache, WindowCachePool, WindowCacheUse, WindowKVCache

UNGUIDED_BELOW = 1e-5
"""Guidance scale below which HF evaluates without the unconditional half."""


@dataclass(frozen=True)
class FlowOptions:
    """Solver options that the windows of one batch share."""

    solver: Solver
    num_steps: int
    sway: float
    guided: bool

    @classmethod
    def of(cls, settings: DiffusionSettings) -> FlowOptions:
        """Return the options of a stream with `settings`."""
        guided = settings.guidance >= UNGUIDED_BELOW
        return cls(settings.solver, settings.points, settings.sway_coefficient, guided)

    @property
    def evaluations(self) -> int:
        """Number of evaluations of the velocity from noise to mel frames."""
        return EVALUATIONS_A_STEP[self.solver] * (self.num_steps - 1)

    @property
    def halves(self) -> int:
        """Number of halves: the conditional one and, under guidance, the unconditional one."""
        return 1 + self.guided

    @property
    def pages(self) -> int:
        """Number of pages of a stream's window cache."""
        return self.evaluations * self.halves


@dataclass(frozen=True)
class Window:
    """One window of a stream."""

    codes: Tensor
    """int [C] on the device, each within the codec's table; C at least 1."""
    first_frame: int
    """Absolute mel frame of the first code; the noise is a function of it."""
    seed: int
    voice: Voice
    guidance_scale: float
    past: WindowCacheUse | None = None
    """None: the window reads no earlier keys and values, and leaves none."""


@dataclass(frozen=True)
class Flow:
    """Inputs of the velocity of one batch of windows, except time and state."""

    condition: Tensor
    """[halves, R, H]: code and voice parts of the input projection; the second half is the unconditional one."""
    scale: Tensor
    """[R, 1] fp32, each window's guidance scale."""
    modulation: Tensor
    """[E, 6 L + 2, H], adaptive norms of every evaluation."""
    grid: Tensor
    """Times of the grid's points, on the host."""
    solver: Solver
    layout: BlockLayout
    """Layout of the R rows."""
    past: HostWindowKVCache
    """Window cache of the blocks of each half."""

    @property
    def is_guided(self) -> bool:
        """True if there is an unconditional half."""
        return len(self.condition) > 1


def condition(codes: Tensor, spoken: Tensor, voices: Tensor, layout: BlockLayout) -> Tensor:
    """Return the contribution of the windows' codes and voices to the DiT's input.

    Args:
        codes: int [sum of C], the windows' codes concatenated.
        spoken: [codes, H], `DiT.codes`.
        voices: [W, halves, H], `Voice.halves` of each window, or the first of them.
        layout: of the windows' mel frames.

    Returns:
        [halves, R, H] fp32.
    """
    rows = voices[layout.windows]
    rows[:, 0] += F.embedding(codes, spoken).repeat_interleave(len(rows) // len(codes), dim=0)
    return rows.transpose(0, 1)


class FlowSolver(Protocol):
    """Solves a flow from noise to mel frames."""

    def steps(self, noise: Tensor, flow: Flow) -> Steps[Tensor]:
        """Solve noise [R, M] fp32 to mel frames of the same shape; other flows may run between the steps."""


class VelocityNetwork(Protocol):
    """The DiT, or a form of it."""

    def velocity_for(self, condition: Tensor, modulation: Tensor, layout: BlockLayout, past: WindowKVCache) -> Velocity:
        """See `DiT.velocity_for`."""


class StepwiseSolver:
    """Solves evaluation by evaluation; the conditional windows come first in the batch, the unconditional ones after
    them.
    """

    def __init__(self, network: VelocityNetwork) -> None:
        self._network = network

    def steps(self, noise: Tensor, flow: Flow) -> Steps[Tensor]:
        """See `FlowSolver`."""
        return integrate(self._velocity(flow), noise, flow.grid, flow.solver)

    def _velocity(self, flow: Flow) -> Velocity:
        lengths, block, device = flow.layout.lengths, flow.layout.block_size, flow.condition.device
        layout = block_layout(lengths * len(flow.condition), block, device)
        evaluate = self._network.velocity_for(flow.condition.flatten(0, 1), flow.modulation, layout, flow.past.upload())
        if not flow.is_guided:
            return evaluate

        def velocity(number: int, state: Tensor) -> Tensor:
            conditional, unconditional = evaluate(number, torch.cat([state, state])).chunk(2)
            return guide(conditional, unconditional, flow.scale)

        return velocity


class Sampler:
    """Solves the flow for batches of windows.

    Args:
        dit: the network with its weights. It computes what is needed once a batch, and a table [codes, H] of all codes
            on its device, 34 MB at the published sizes.
        solver: computes the evaluations; by default step by step with `dit` itself.
        noise: see `noise.standard_normal`.
        lay_condition: see `condition`.
        past: cache for what windows leave to later ones; none by default.

    Attributes:
        past: the same.
    """

    def __init__(
        self,
        dit: DiT,
        device: torch.device,
        solver: FlowSolver | None = None,
        *,
        noise: Callable[[Sequence[tuple[int, int, int]], int, torch.device], Tensor] = standard_normal,
        lay_condition: Callable[[Tensor, Tensor, Tensor, BlockLayout], Tensor] = condition,
        past: WindowCachePool | None = None,
    ) -> None:
        self.past = past or dit.past_pool(0, torch.float32)
        self._dit = dit
        # One product for all codes: otherwise each window would need a product of its own.
        with torch.no_grad():
            self._spoken = dit.codes()
        self._device = device
        self._solver: FlowSolver = solver or StepwiseSolver(dit)
        self._noise, self._lay_condition = noise, lay_condition
        self._scale = functools.lru_cache(maxsize=LAYOUTS_KEPT)(self._scale_of)
        # Clients choose the options, so only the latest few tables are cached.
        self._modulation = functools.lru_cache(maxsize=GRIDS_KEPT)(self._modulation_of)

    def sample(self, windows: Sequence[Window], options: FlowOptions) -> tuple[Tensor, ...]:
        """Return mel frames [T, M] fp32 of each window, T = C x repeats."""
        return run_out(self.steps(windows, options))

    def steps(self, windows: Sequence[Window], options: FlowOptions) -> Steps[tuple[Tensor, ...]]:
        """Run `sample` one solver step at a time; other windows may be sampled between the steps."""
        config = self._dit.config
        lengths = tuple(window.codes.shape[0] * config.repeats for window in windows)
        layout = block_layout(lengths, config.block_size, self._device)
        spans = [(w.seed, w.first_frame, w.first_frame + n) for w, n in zip(windows, lengths, strict=True)]
        noise = self._noise(spans, config.mel_dim, self._device)
        return layout.split((yield from self._solver.steps(noise, self._flow(windows, layout, options))))

    def _flow(self, windows: Sequence[Window], layout: BlockLayout, options: FlowOptions) -> Flow:
        codes = torch.cat([window.codes for window in windows])
        voices = torch.stack([window.voice.halves for window in windows])[:, : options.halves]
        return Flow(
            condition=self._lay_condition(codes, self._spoken, voices, layout),
            scale=self._scale(layout.lengths, tuple(window.guidance_scale for window in windows)),
            modulation=self._modulation(options),
            grid=time_grid(options.num_steps, options.sway),
            solver=options.solver,
            layout=layout,
            past=self.past.of_batch(
                [window.past for window in windows], layout, evaluations=options.evaluations, halves=options.halves
            ),
        )

    def _scale_of(self, lengths: tuple[int, ...], scales: tuple[float, ...]) -> Tensor:
        """Return `Flow.scale`; cached, so not to be written to."""
        rows = np.repeat(np.array(scales, np.float32), lengths)
        return to_device(torch.from_numpy(rows)[:, None], self._device)

    def _modulation_of(self, options: FlowOptions) -> Tensor:
        """Return `Flow.modulation`; cached, so not to be written to."""
        times = evaluation_times(time_grid(options.num_steps, options.sway), options.solver)
        return self._dit.modulation(to_device(times, self._device))
