# SPDX-License-Identifier: Apache-2.0
"""Which form of the networks runs: the plain one in float32, or the fused one in half precision, under CUDA graphs.

The only module that knows both. The fused form's modules are imported when it is wanted: they need the Triton
language, which a machine without a GPU may lack.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from triton_omni.core.settings import Dtype, SettingsError, Token2WavSettings
from triton_omni.token2wav.chunking import streaming_plan
from triton_omni.token2wav.dit import DiT
from triton_omni.token2wav.networks import Networks
from triton_omni.token2wav.sampler import FlowOptions, FlowSolver, Sampler, StepwiseSolver
from triton_omni.token2wav.window_cache import WindowCachePool

GRAPHED_BLOCKS = (1, *range(2, 16, 2), *range(16, 37, 4), 42, 50, 56, 64, 72, 88, 104, 128, 160, 200)
"""Blocks of a batch, one half of guidance counted, for which a solver's step is recorded: a long window of the plan
`balanced` has seven, a first one two, one of `low_latency` one. Beyond 72 they are whole replies, of up to 48 s;
kernel by kernel these are as fast as the host launches them.

How well a product's tiles fill the multiprocessors differs: on an H200 50 blocks take less time than 48 (8.4 and 8.9 ms
a step), 64 hardly more than 60 (10.6 and 10.3), but 68 as long as 72 (12.2)."""

LARGEST_VOCODER_BATCH = 8
"""Chunks of one recorded pass: more of them take proportionally longer, and a start longer to record."""


class Vocoder(Protocol):
    """Mel frames to a waveform: the plain BigVGAN, or a fused form of it."""

    samples_per_frame: int

    def __call__(self, mel: Tensor) -> Tensor:
        """See `BigVGAN.forward`."""


def accelerate(networks: Networks, settings: Token2WavSettings, device: torch.device) -> tuple[Sampler, Vocoder]:
    """The forms that `settings.dtype` and `settings.cuda_graphs` choose.

    Raises:
        SettingsError: half precision without a GPU.
    """
    dtype, dit = resolve_dtype(settings.dtype, device), networks.dit
    if dtype is torch.float32:
        return Sampler(dit, device, past=past_pool(dit, settings, dtype)), networks.vocoder
    from triton_omni.token2wav.fused_dit import FusedDiT
    from triton_omni.token2wav.fused_vocoder import FusedVocoder
    from triton_omni.token2wav.graphs import GraphedSolver, GraphedVocoder, GraphPool
    from triton_omni.token2wav.kernels import fused_standard_normal
    from triton_omni.token2wav.solver_kernels import fused_condition

    solver: FlowSolver
    vocoder: Vocoder
    with torch.inference_mode():
        fused, vocoder = FusedDiT(dit, dtype), FusedVocoder(networks.vocoder, dtype)
        past = past_pool(dit, settings, dtype)
        if settings.cuda_graphs:
            pool, flow = GraphPool(), FlowOptions.of(settings.diffusion)
            kinds = [(flow.solver, flow.guided)]
            solver = GraphedSolver(dit, fused, pool, past, sizes=GRAPHED_BLOCKS, recorded=kinds)
            shapes = vocoder_shapes(settings, networks)
            vocoder = GraphedVocoder(vocoder, dit.config.mel_dim, shapes, pool, device)
            # What ran before each recording held memory of its own; graphs have theirs in the pool.
            torch.cuda.empty_cache()
        else:
            solver = StepwiseSolver(fused)
    sampler = Sampler(dit, device, solver, noise=fused_standard_normal, lay_condition=fused_condition, past=past)
    return sampler, vocoder


def past_pool(dit: DiT, settings: Token2WavSettings, dtype: torch.dtype) -> WindowCachePool:
    """Room for the pasts of `max_streams` streams that leave `diffusion` as it is set."""
    return dit.past_pool(settings.max_streams * FlowOptions.of(settings.diffusion).pages, dtype)


def resolve_dtype(dtype: Dtype, device: torch.device) -> torch.dtype:
    """The dtype by its name.

    Raises:
        SettingsError: half precision without a GPU.
    """
    if dtype == "auto":
        dtype = "float16" if device.type == "cuda" else "float32"
    if dtype != "float32" and device.type != "cuda":
        raise SettingsError(f"dtype: {dtype} needs a GPU, the device is {device.type}; use float32")
    chosen: torch.dtype = getattr(torch, dtype)
    return chosen


def vocoder_shapes(settings: Token2WavSettings, networks: Networks) -> list[tuple[int, int]]:
    """(batch, frames) of the regular chunks of the plan that streams use: batches by powers of two, of which any is put
    together, up to `LARGEST_VOCODER_BATCH` and no more chunks than are solved together."""
    config, chosen = networks.dit.config, settings.plans[settings.plan]
    plan = streaming_plan(chosen, block_frames=config.block_size, frames_per_code=config.repeats)
    shapes = set()
    for chunk in plan.regular_chunks():
        most = min(settings.most_together, max(1, settings.max_batch_frames // len(chunk.solved)))
        powers = range(min(most, LARGEST_VOCODER_BATCH).bit_length())
        shapes |= {(2**power, len(chunk.vocoder)) for power in powers}
    return sorted(shapes)
