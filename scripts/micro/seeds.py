# SPDX-License-Identifier: Apache-2.0
"""Cost of seeds: a thinker step's draws and the noise of token2wav's windows, with and without seeds.

Without seeds one generator serves all, and gives nobody the same numbers again: vLLM's own draw, torch's own noise.
Either way a batch is one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from triton_omni.checkpoint.config import load_config
from triton_omni.core.gpu import to_device
from triton_omni.token2wav import noise
from triton_omni.vllm_hooks.shared import sampling

from .figures import OURS, READY, UNSEEDED, milliseconds
from .plan import Plan, repeated, timed

WINDOW_FRAMES: Final = 72
"""New mel frames of a window of the plan `balanced`."""

Draw = Callable[[Tensor, Tensor], Tensor]
Noise = Callable[[list[tuple[int, int, int]], int, torch.device], Tensor]
Ways = Mapping[str, Callable[[], object]]
"""Timed calls by implementation."""


def seeds(plan: Plan, at: torch.device) -> Iterator[Mapping[str, Any]]:
    """Seconds of the draws of `plan.batches` sequences, and of the noise of as many windows, host and device."""
    config = load_config(Path(plan.model))
    draw, normal = _forms(at)
    yield READY
    for name, ways in (
        ("draw", partial(_draws, draw, config.thinker.decoder.vocab_size, at)),
        ("noise", partial(_noises, normal, config.dit.mel_dim, at)),
    ):
        for batch in plan.batches:
            for by, call in ways(batch).items():
                yield milliseconds(name, by, repeated(plan, partial(timed, call, at)), {"batch": batch})


def _forms(at: torch.device) -> tuple[Draw, Noise]:
    """Return the implementations that the engines choose on such a device."""
    if at.type != "cuda":
        return sampling.draw, noise.standard_normal
    from triton_omni.token2wav.kernels import fused_standard_normal
    from triton_omni.vllm_hooks.kernels.draw import fused_draw

    return fused_draw, fused_standard_normal


def _draws(draw: Draw, vocabulary: int, at: torch.device, sequences: int) -> Ways:
    logits = torch.randn(sequences, vocabulary, device=at)
    return {OURS: partial(_seeded, draw, logits), UNSEEDED: partial(_unseeded, logits)}


def _noises(normal: Noise, channels: int, at: torch.device, windows: int) -> Ways:
    spans = [(seed, 0, WINDOW_FRAMES) for seed in range(windows)]
    unseeded = partial(torch.randn, windows * WINDOW_FRAMES, channels, device=at)
    return {OURS: partial(normal, spans, channels, at), UNSEEDED: unseeded}


def _seeded(draw: Draw, logits: Tensor) -> Tensor:
    count = np.arange(len(logits), dtype=np.uint64)
    uniforms = torch.from_numpy(sampling.counter_uniforms(count, count))
    return draw(logits, to_device(uniforms, logits.device))


def _unseeded(logits: Tensor) -> Tensor:
    # Once `compat` has prepared what vLLM imports.
    from vllm.v1.sample.ops.topk_topp_sampler import random_sample

    return random_sample(logits.softmax(dim=-1, dtype=torch.float32), {})
