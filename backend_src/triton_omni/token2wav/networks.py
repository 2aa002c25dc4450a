# SPDX-License-Identifier: Apache-2.0
"""Builds the networks of this stage, loads their weights strictly, encodes every voice once, and chooses their form.

There is a plain form in float32 and a fused one in half precision, with CUDA graphs. Only this module imports both. The
fused form's modules are imported only if needed: they need the Triton language, which a machine without a GPU may lack.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from triton_omni.checkpoint.config import CheckpointError, load_config
from triton_omni.checkpoint.facts import DitConfig, FlowConfig
from triton_omni.checkpoint.speakers import Speaker, load_speakers
from triton_omni.checkpoint.weights import load_module
from triton_omni.core.gpu import use_full_float32, use_ordered_sums
from triton_omni.core.settings import Dtype, SettingsError, Token2WavSettings
from triton_omni.token2wav.attention import ATTENTION
from triton_omni.token2wav.bigvgan import BigVGAN
from triton_omni.token2wav.chunking import streaming_plan
from triton_omni.token2wav.dit import DiT, Voice
from triton_omni.token2wav.sampler import FlowOptions, FlowSolver, Sampler, StepwiseSolver
from triton_omni.token2wav.window_cache import WindowCachePool

DIT_PREFIX = "token2wav.code2wav_dit_model."
VOCODER_PREFIX = "token2wav.code2wav_bigvgan_model."
_DERIVED = ("rotary_embed.inv_freq", ".filter")
"""Suffixes of tensor names that some checkpoints carry although their values follow from the configuration."""


@dataclass(frozen=True)
class Networks:
    """Networks and voices that the engine runs, on its device and without gradients."""

    dit: DiT
    vocoder: BigVGAN
    voices: Mapping[str, Voice]
    flow: FlowConfig
    """Settings of the solver that the checkpoint states."""


def load_networks(checkpoint: Path, settings: Token2WavSettings, device: torch.device) -> Networks:
    """Load DiT, vocoder and voices from the checkpoint's folder, in fp32.

    Raises:
        CheckpointError: a file cannot be read, a tensor is missing, unexpected or misshapen, or a voice's reference
            is too short for the speaker encoder.
        SettingsError: `max_codes` makes more mel frames than the DiT has positions for.
    """
    config = load_config(checkpoint)
    _check_length(settings, config.dit)
    use_full_float32(device)
    if settings.deterministic:
        use_ordered_sums(device)
    with torch.device(device):
        dit = DiT(config.dit, ATTENTION[settings.attention])
        vocoder = BigVGAN(config.bigvgan)
    load_module(dit, checkpoint, DIT_PREFIX, rename=_without_derived, device=device)
    load_module(vocoder, checkpoint, VOCODER_PREFIX, rename=_without_derived, device=device)
    speakers = load_speakers(checkpoint, config).by_name
    for speaker in speakers.values():
        _check_reference(speaker, dit.input_embed.spk_encoder.min_frames)
    with torch.inference_mode():
        voices = {
            name: dit.voice(speaker.cond[0].to(device), speaker.ref_mel[0].to(device))
            for name, speaker in speakers.items()
        }
    return Networks(dit, vocoder, voices, config.flow)


def _check_length(settings: Token2WavSettings, config: DitConfig) -> None:
    frames = settings.max_codes * config.repeats
    if frames > config.max_positions:
        raise SettingsError(
            f"max_codes: {settings.max_codes} codes are {frames} mel frames, the checkpoint's DiT takes at most "
            f"{config.max_positions}"
        )


def _check_reference(speaker: Speaker, min_frames: int) -> None:
    frames = speaker.ref_mel.shape[1]
    if frames < min_frames:
        raise CheckpointError(
            f"spk_dict.pt: {speaker.name}.ref_mel has {frames} mel frames, at least {min_frames} needed"
        )


def _without_derived(name: str) -> str | None:
    return None if name.endswith(_DERIVED) else name


# --- fast forms -------------------------------------------------------------------------------------------------------


GRAPHED_SIZES = (1, *range(2, 16, 2), *range(16, 41, 4), 42, 47, 50, 53, 56, 64, 72, 88, 104, 128, 160, 200)
"""Rows, in whole blocks, of one half of guidance for which a solver step is recorded. A long window of the plan
`balanced` has the rows of 6.58 blocks, a first one of 1.58, and one of `low_latency` of one. Sizes beyond 53 are for
whole replies of up to 48 s; without a graph the host's kernel launches limit these.

A product's tiles fill the multiprocessors unevenly. On an H200 a batch of 47 blocks (7 long windows) takes 76 ms, one
of 48 blocks 87; 53 blocks (8 long windows) take 84 and 54 blocks 95. 64 blocks take hardly more than 60 (104, 99)."""

VOCODER_BATCHES = (1, 2, 4, 6, 8)
"""Numbers of chunks in a recorded pass of the vocoder. One pass with empty places is faster than two full ones: on an
H200 8 chunks take 8.0 ms, but 4, 2 and 1 together 10.4. More than 8 take proportionally longer to run and to record."""


class Vocoder(Protocol):
    """Mel frames to a waveform: the plain BigVGAN, or a fused form of it."""

    samples_per_frame: int

    def __call__(self, mel: Tensor) -> Tensor:
        """See `BigVGAN.forward`."""


def accelerate(networks: Networks, settings: Token2WavSettings, device: torch.device) -> tuple[Sampler, Vocoder]:
    """Return the forms that `settings.dtype` and `settings.cuda_graphs` choose.

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
        dit.free_products()  # 0.7 GB at the published sizes, copied by now
        past = past_pool(dit, settings, dtype)
        if settings.cuda_graphs:
            pool, flows = GraphPool(), [FlowOptions.of(settings.diffusion_of(name, {})) for name in settings.presets]
            kinds = sorted({(flow.solver, flow.guided) for flow in flows})
            solver = GraphedSolver(dit, fused, pool, past, sizes=GRAPHED_SIZES, recorded=kinds)
            shapes = vocoder_shapes(settings, networks)
            vocoder = GraphedVocoder(vocoder, dit.config.mel_dim, shapes, pool, device)
            # The warm-up calls used memory outside the graphs' pool: release it.
            torch.cuda.empty_cache()
        else:
            solver = StepwiseSolver(fused)
    sampler = Sampler(dit, device, solver, noise=fused_standard_normal, lay_condition=fused_condition, past=past)
    return sampler, vocoder


def past_pool(dit: DiT, settings: Token2WavSettings, dtype: torch.dtype) -> WindowCachePool:
    """Allocate window caches for `max_streams` streams that use the default preset."""
    return dit.past_pool(settings.max_streams * FlowOptions.of(settings.diffusion_of(None, {})).pages, dtype)


def resolve_dtype(dtype: Dtype, device: torch.device) -> torch.dtype:
    """Resolve the dtype by its name.

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
    """Return (batch, frames) of the regular chunks of the plan that streams use: batches up to the first that holds all
    chunks that are solved together.
    """
    config, chosen = networks.dit.config, settings.plans[settings.plan]
    plan = streaming_plan(chosen, block_frames=config.block_size, frames_per_code=config.repeats)
    shapes = set()
    for chunk in plan.regular_chunks:
        most = min(settings.most_together, max(1, settings.max_batch_frames // len(chunk.solved)))
        sizes = (batch for smaller, batch in itertools.pairwise((0, *VOCODER_BATCHES)) if smaller < most)
        shapes |= {(batch, len(chunk.vocoder)) for batch in sizes}
    return sorted(shapes)
