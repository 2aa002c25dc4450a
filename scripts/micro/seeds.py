# SPDX-License-Identifier: Apache-2.0
"""What seeds cost: a thinker step's draws and the noise of token2wav's windows, beside the same without seeds.

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
from triton_omni.token2wav import noise
from triton_omni.token2wav.transfer import to_device
from triton_omni.vllm_hooks import sampling

from .figures import OURS, READY, UNSEEDED, milliseconds
from .plan import Plan, repeated, timed

WINDOW_FRAMES: Final = 72
"""New mel frames of a window of the plan `balanced`."""

Draw = Callable[[Tensor, Tensor], Tensor]
Noise = Callable[[list[tuple[int, int, int]], int, torch.device], Tensor]


def seeds(plan: Plan, at: torch.device) -> Iterator[Mapping[str, Any]]:
    """Seconds of the draws of `plan.batches` sequences, and of the noise of as many windows; the host's work included."""
    config = load_config(Path(plan.model))
    draw, normal = _forms(at)
    yield READY
    for batch in plan.batches:
        logits = torch.randn(batch, config.thinker.decoder.vocab_size, device=at)
        yield from _pair("draw", partial(_seeded, draw, logits), partial(_unseeded, logits), plan, at, batch)
    for batch in plan.batches:
        spans, channels = [(seed, 0, WINDOW_FRAMES) for seed in range(batch)], config.dit.mel_dim
        own = partial(normal, spans, channels, at)
        yield from _pair("noise", own, partial(torch.randn, own().shape, device=at), plan, at, batch)


def _forms(at: torch.device) -> tuple[Draw, Noise]:
    """What the engines choose on such a device."""
    if at.type != "cuda":
        return sampling.draw, noise.standard_normal
    from triton_omni.token2wav.kernels import fused_standard_normal
    from triton_omni.vllm_hooks.draw_kernels import fused_draw

    return fused_draw, fused_standard_normal


def _seeded(draw: Draw, logits: Tensor) -> Tensor:
    count = np.arange(len(logits), dtype=np.uint64)
    uniforms = torch.from_numpy(sampling.counter_uniforms(count, count))
    return draw(logits, to_device(uniforms, logits.device))


def _unseeded(logits: Tensor) -> Tensor:
    # Once `compat` has prepared what vLLM imports.
    from vllm.v1.sample.ops.topk_topp_sampler import random_sample

    return random_sample(logits.softmax(dim=-1, dtype=torch.float32), {})


def _pair(
    name: str, ours: Callable[[], object], unseeded: Callable[[], object], plan: Plan, at: torch.device, batch: int
) -> Iterator[Mapping[str, Any]]:
    for by, call in ((OURS, ours), (UNSEEDED, unseeded)):
        yield milliseconds(name, by, repeated(plan, partial(timed, call, at)), {"batch": batch})
