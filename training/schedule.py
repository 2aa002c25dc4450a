# SPDX-License-Identifier: Apache-2.0
"""Time boxes, learning rates, averages of weights: what the training loops share."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class Clock:
    """The time box of a stage. Every run ends its learning rate low, so that each leaves a usable model."""

    def __init__(self, seconds: float) -> None:
        self._begin, self._seconds = time.monotonic(), max(seconds, 1e-6)

    @property
    def part(self) -> float:
        """Part of the box that is over, at most 1."""
        return min(1.0, (time.monotonic() - self._begin) / self._seconds)

    @property
    def over(self) -> bool:
        """True when the stage has to end."""
        return self.part >= 1.0

    def restart(self) -> None:
        """Count from now on, with the time that is left: setting up is not training."""
        now = time.monotonic()
        self._seconds = max(self._seconds - (now - self._begin), 1.0)
        self._begin = now


@dataclass(frozen=True)
class Rate:
    """Learning rate: a warm-up by steps, a plateau, then a cosine by time."""

    peak: float
    warm_steps: int = 200
    hold: float = 0.3
    """Part of the time box at which the fall begins."""
    floor: float = 0.06
    """Part of the peak at the end."""

    def at(self, step: int, part: float) -> float:
        """The rate at a step (from 0) of this run, `part` of its time box being over."""
        if step < self.warm_steps:
            return self.peak * (step + 1) / self.warm_steps
        fall = max(0.0, (part - self.hold) / (1 - self.hold))
        return self.peak * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(fall, 1.0))))


class Ema:
    """Moving average of a module's weights, shorter at the beginning."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._decay, self._steps = decay, 0
        self._live = dict(module.state_dict())
        self.tensors: dict[str, Tensor] = {key: value.detach().clone() for key, value in self._live.items()}
        self._names = [key for key, value in self._live.items() if value.is_floating_point()]

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the module's weights."""
        self._steps += 1
        decay = min(self._decay, (1 + self._steps) / (10 + self._steps))
        averages = [self.tensors[name] for name in self._names]
        torch._foreach_lerp_(averages, [self._live[name].detach() for name in self._names], 1 - decay)

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of the average."""
        return {key: value.clone() for key, value in self.tensors.items()}

    @torch.no_grad()
    def restore(self, snapshot: dict[str, Tensor]) -> None:
        """Set both the average and the module to a copy of the average."""
        for key, value in snapshot.items():
            self.tensors[key].copy_(value)
            self._live[key].copy_(value)


def adamw(
    parameters: Iterable[nn.Parameter], betas: tuple[float, float] = (0.9, 0.98), decay: float = 0.01
) -> torch.optim.AdamW:
    """AdamW with weight decay of matrices only, fit for a CUDA graph; `set_rate` comes before the first step."""
    kept = [parameter for parameter in parameters if parameter.requires_grad]
    on_gpu = kept[0].is_cuda
    groups = [
        {"params": [parameter for parameter in kept if parameter.ndim > 1], "weight_decay": decay},
        {"params": [parameter for parameter in kept if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    rate = torch.zeros((), device=kept[0].device) if on_gpu else 0.0
    return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=on_gpu, capturable=on_gpu)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate, also of a step that was recorded."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def descend(optimizer: torch.optim.Optimizer, loss: Tensor, max_norm: float) -> Tensor:
    """One step down the gradient of `loss`, whose norm is clipped; parts that are not finite count as zero.

    Returns:
        The norm [] before it was clipped.
    """
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    for parameter in parameters:
        if parameter.grad is not None:
            torch.nan_to_num_(parameter.grad, nan=0.0, posinf=0.0, neginf=0.0)
    optimizer.step()
    return norm.detach()


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 on a GPU, fp32 elsewhere; casts are not cached, since a CUDA graph must not refer to them."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)
