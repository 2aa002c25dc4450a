# SPDX-License-Identifier: Apache-2.0
"""Builds the networks of this stage, loads their weights strictly and encodes every voice once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from triton_omni.checkpoint.config import CheckpointError, load_config
from triton_omni.checkpoint.facts import DitConfig, FlowConfig
from triton_omni.checkpoint.speakers import Speaker, load_speakers
from triton_omni.checkpoint.weights import load_module
from triton_omni.core.precision import use_full_float32, use_ordered_sums
from triton_omni.core.settings import SettingsError, Token2WavSettings
from triton_omni.token2wav.attention import ATTENTION
from triton_omni.token2wav.bigvgan import BigVGAN
from triton_omni.token2wav.dit import DiT, Voice

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
