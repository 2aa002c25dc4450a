# SPDX-License-Identifier: Apache-2.0
"""BigVGAN's activations as pointwise sums, which a compiler makes one kernel.

Same parameters and results as `TorchActivation1d` of HF: upsampling by 2, snake, downsampling by 2, filters of 12 taps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from training.log import Log

_TAPS = 12


def upsampled_snake(x: Tensor, alpha: Tensor, beta: Tensor, up: list[float], down: list[float]) -> Tensor:
    """The activation of [B, C, T].

    Args:
        x: padded by replication as HF does: 5 on both sides before upsampling, 5 and 6 before downsampling.
        alpha: [C], the snake's log frequency.
        beta: [C], the log of its inverse strength.
        up: taps of the upsampling filter.
        down: taps of the downsampling filter.
    """
    length = x.shape[-1]
    padded = torch.cat([x[..., :1].expand(-1, -1, 5), x, x[..., -1:].expand(-1, -1, 5)], dim=-1)
    # Transposed convolution of stride 2, cut by 15 on both sides: out[m] = 2 * sum of padded[j] * up[m + 15 - 2 j].
    even, odd = torch.zeros_like(x), torch.zeros_like(x)
    for tap in range(_TAPS // 2):
        even = even + padded[..., 7 - tap : 7 - tap + length] * (2 * up[2 * tap + 1])
        odd = odd + padded[..., 8 - tap : 8 - tap + length] * (2 * up[2 * tap])
    frequency, strength = torch.exp(alpha).unsqueeze(-1), 1.0 / (torch.exp(beta).unsqueeze(-1) + 1e-9)
    even = even + strength * torch.sin(even * frequency).square()
    odd = odd + strength * torch.sin(odd * frequency).square()
    first, last = even[..., :1].expand(-1, -1, 3), odd[..., -1:].expand(-1, -1, 3)
    halves = (torch.cat([first, even, last], dim=-1), torch.cat([first, odd, last], dim=-1))
    out = torch.zeros_like(x)
    for tap in range(_TAPS):
        place, half = divmod(tap - 5, 2)
        out = out + halves[half][..., 3 + place : 3 + place + length] * down[tap]
    return out


class Activation(nn.Module):
    """Stands in for HF's activation, whose parameters it has under the same names."""

    def __init__(self, theirs: Any, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.act = theirs.act
        self._up = [float(tap) for tap in theirs.upsample.filter.flatten()]
        self._down = [float(tap) for tap in theirs.downsample.filter.flatten()]
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T] to [B, C, T]."""
        return self._function(x, self.act.alpha, self.act.beta, self._up, self._down)


def replace_activations(model: Any, function: Callable[..., Tensor]) -> None:
    """Let all activations of HF's vocoder be computed by `function`, which has `upsampled_snake`'s arguments."""
    for block in model.resblocks:
        block.activations = nn.ModuleList([Activation(theirs, function) for theirs in block.activations])
    model.activation_post = Activation(model.activation_post, function)


def compile_activations(model: Any, log: Log) -> None:
    """Compile the activations of HF's vocoder on a GPU: they take most of a step otherwise."""
    torch._dynamo.config.recompile_limit = 64  # one compilation a shape
    replace_activations(model, torch.compile(upsampled_snake, dynamic=False))
    log.say("activations will be compiled")
