# SPDX-License-Identifier: Apache-2.0
"""Windows of codes to mel frames: noise, conditioning, guidance and solver around the DiT, for a ragged batch.

The same as HF's `Qwen2_5OmniToken2WavDiTModel.sample` on each window's codes, given the same noise.
Knows nothing of streams; nothing in the solver's loop waits for the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triton_omni.token2wav.batching import BlockLayout, block_layout
from triton_omni.token2wav.dit import DiT, Modulation, Rotary, Voice
from triton_omni.token2wav.noise import standard_normal
from triton_omni.token2wav.ode import Solver, evaluation_times, guide, integrate, time_grid

UNGUIDED_BELOW = 1e-5
"""HF evaluates without the unconditional half below this guidance scale."""
MODULATIONS_KEPT = 4

Evaluate = Callable[[Tensor, Tensor, Modulation, Rotary, BlockLayout], Tensor]
"""The signature of `DiT.forward`, so that a compiled or captured form can stand in for it."""


@dataclass(frozen=True)
class FlowOptions:
    """What the windows of one batch must share."""

    solver: Solver
    num_steps: int
    sway: float
    guided: bool


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


class Sampler:
    """Solves the flow for batches of windows.

    Args:
        dit: the network, for what is computed once a batch.
        evaluate: what is computed at every evaluation; `dit` itself unless given.
    """

    def __init__(self, dit: DiT, device: torch.device, evaluate: Evaluate | None = None) -> None:
        self._dit = dit
        self._device = device
        self._evaluate: Evaluate = evaluate or dit
        self._modulations: OrderedDict[FlowOptions, list[Modulation]] = OrderedDict()

    def sample(self, windows: Sequence[Window], options: FlowOptions) -> list[Tensor]:
        """Mel frames [T, M] fp32 of each window, T = C x repeats."""
        config = self._dit.config
        lengths = [window.codes.shape[0] * config.repeats for window in windows]
        layout = block_layout(lengths, config.block_size, self._device)
        noise = layout.pack(
            [
                standard_normal(w.seed, w.first_frame, w.first_frame + length, config.mel_dim, self._device)
                for w, length in zip(windows, lengths, strict=True)
            ]
        )
        velocity = self._guided if options.guided else self._unguided
        grid = time_grid(options.num_steps, options.sway)
        return layout.unpack(integrate(velocity(windows, layout, options), noise, grid, options.solver))

    def _unguided(
        self, windows: Sequence[Window], layout: BlockLayout, options: FlowOptions
    ) -> Callable[[int, Tensor], Tensor]:
        condition = layout.pack([self._dit.codes(window.codes) + window.voice.conditional for window in windows])
        rotary = self._dit.rotary(layout.positions)
        table = self._modulation(options)

        def velocity(number: int, state: Tensor) -> Tensor:
            return self._evaluate(state, condition, table[number], rotary, layout)

        return velocity

    def _guided(
        self, windows: Sequence[Window], layout: BlockLayout, options: FlowOptions
    ) -> Callable[[int, Tensor], Tensor]:
        """Conditional windows first, the unconditional ones behind them in the same batch."""
        spoken = [self._dit.codes(window.codes) + window.voice.conditional for window in windows]
        unspoken = [window.voice.unconditional.expand_as(rows) for window, rows in zip(windows, spoken, strict=True)]
        both = block_layout(layout.lengths * 2, layout.block_size, self._device)
        condition = both.pack([*spoken, *unspoken])
        rotary = self._dit.rotary(both.positions)
        table = self._modulation(options)
        scales = torch.tensor([window.guidance_scale for window in windows]).to(self._device)
        scale = layout.pack([row.expand(n, 1) for row, n in zip(scales, layout.lengths, strict=True)])

        def velocity(number: int, state: Tensor) -> Tensor:
            doubled = torch.cat([state, state])
            output = self._evaluate(doubled, condition, table[number], rotary, both)
            conditional, unconditional = output.chunk(2)
            return guide(conditional, unconditional, scale)

        return velocity

    def _modulation(self, options: FlowOptions) -> list[Modulation]:
        """The table of the options' times; clients choose the options, so only the latest few are kept."""
        if options not in self._modulations:
            times = evaluation_times(time_grid(options.num_steps, options.sway), options.solver)
            self._modulations[options] = self._dit.modulation(times.to(self._device))
        self._modulations.move_to_end(options)
        while len(self._modulations) > MODULATIONS_KEPT:
            self._modulations.popitem(last=False)
        return self._modulations[options]
