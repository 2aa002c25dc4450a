# SPDX-License-Identifier: Apache-2.0
"""The thinker's network under a name of this project: vLLM's own, with HF's positions for sound inside video.

vLLM inspects the classes of its own registry in a child process, where the preparations of `compat` do not
hold; a registered class object is inspected in this process.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from triton_omni.vllm_hooks.compat import (
    MULTIMODAL_REGISTRY,
    ModelRegistry,
    MultiModalFeatureSpec,
    Qwen2_5OmniThinkerDummyInputsBuilder,
    Qwen2_5OmniThinkerForConditionalGeneration,
    VllmConfig,
    build_mm_input_norm,
)
from triton_omni.vllm_hooks.media_processor import MediaProcessor, ProcessingInfo
from triton_omni.vllm_hooks.named_weights import Weights, load_named
from triton_omni.vllm_hooks.platform import UnsupportedEngineError
from triton_omni.vllm_hooks.vision_graphs import VisionGraphs

THINKER_ARCHITECTURE = "TritonOmniThinker"


@MULTIMODAL_REGISTRY.register_processor(
    MediaProcessor,
    info=ProcessingInfo,
    dummy_inputs=Qwen2_5OmniThinkerDummyInputsBuilder,
)
class ThinkerNetwork(Qwen2_5OmniThinkerForConditionalGeneration, VisionGraphs):
    """Qwen2.5-Omni's thinker: text, image, sound and video in, logits and last hidden states out.

    Pixels come to the device as bytes and are normalised there, as vLLM has it for Qwen2.5-VL, whose vision tower this
    is: on the host that takes longer than scaling, and four times as much is copied.
    """

    supports_mm_device_do_normalize = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.visual.input_norm = build_mm_input_norm(vllm_config.model_config)
        self._checkpoint = Path(vllm_config.model_config.model)

    def load_weights(self, weights: Weights) -> set[str]:
        """Load the `thinker.` weights.

        Raises:
            CheckpointError: one has not the network's shape.
            ValueError: one is missing or unexpected.
        """
        return load_named(super().load_weights, weights, self._checkpoint)

    @torch.inference_mode()
    def warm_vision_up(self) -> None:
        """Send an image of one token through the vision tower, so that its kernels are compiled and loaded."""
        tower: Any = self.visual
        side = tower.spatial_merge_size
        pixels = torch.zeros(side**2, tower.patch_embed.proj.input_size, dtype=torch.uint8, device=tower.device)
        self.embed_multimodal(pixel_values=pixels, image_grid_thw=torch.tensor([[1, side, side]], device="cpu"))

    def _get_audio_for_video_mapping(self, mm_features: list[MultiModalFeatureSpec]) -> tuple[dict[int, int], set[int]]:
        """Frames of the sound of each video that is heard, and where these are; vLLM takes the first sounds for them.

        The placeholders of a video and of its sound begin at one token, those of any two others do not.
        """
        films = {feature.mm_position.offset for feature in mm_features if feature.modality == "video"}
        sounds = {
            feature.mm_position.offset: _frames_of(feature)
            for feature in mm_features
            if feature.modality == "audio" and feature.mm_position.offset in films
        }
        return sounds, set(sounds)

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[Tensor, int]:
        """M-RoPE positions int64 [3, P] of a prompt, and how far its reply's positions run ahead of their indices.

        vLLM 0.32.0 lays the positions of sound inside video one token early, over the begin-of-audio token.
        Source: `get_rope_index` of transformers, where both begin tokens share a position, and both end tokens.
        """
        if not mm_features:
            # As both say of text, in a tenth of the time; by numpy, as in `positions.py`.
            text = np.empty((3, len(input_tokens)), np.int64)
            text[:] = np.arange(len(input_tokens))
            return torch.from_numpy(text), 0
        positions, delta = super().get_mrope_input_positions(input_tokens, mm_features)
        sounding = [offset for offset, _, data in self.iter_mm_features(mm_features) if data.get("use_audio_in_video")]
        if not sounding:
            return positions, delta
        for offset in sounding:
            end = input_tokens.index(self.config.audio_end_token_id, offset)
            positions = move_interleaved(positions, input_tokens, offset, end)
        return positions, int(positions.max()) + 1 - len(input_tokens)


def _frames_of(sound: MultiModalFeatureSpec) -> int:
    data: Any = sound.data
    return int(data["audio_feature_lengths"].data)


def check_time_scale(thinker_config: PretrainedConfig) -> None:
    """Refuse a checkpoint whose two figures for positions a second differ: HF reads one, vLLM the other.

    Raises:
        UnsupportedEngineError: naming both.
    """
    ours, theirs = thinker_config.position_id_per_seconds, thinker_config.vision_config.tokens_per_second
    if ours != theirs:
        raise UnsupportedEngineError(
            f"thinker_config.position_id_per_seconds is {ours}, vision_config.tokens_per_second is {theirs}: "
            "vLLM would place videos elsewhere than HF does; make them equal"
        )


def move_interleaved(positions: Tensor, tokens: list[int], begin: int, end: int) -> Tensor:
    """Put the positions of one video with sound where HF has them.

    Args:
        positions: int64 [3, P] with the span's media positions one index early, and text behind them.
        tokens: the P ids.
        begin, end: indices of the begin-of-audio and end-of-audio ids around the media ids.

    Returns:
        int64 [3, P].
    """
    media = positions[:, begin : end - 1]
    # As in HF, what follows counts on from the last chunk, not from the highest position of the span.
    last_chunk = sum(1 for _ in takewhile(lambda token: token == tokens[end - 1], reversed(tokens[begin + 1 : end])))
    end_position = int(media[:, -last_chunk:].max()) + 1
    ends = torch.full((3, 2), end_position, dtype=positions.dtype)
    rest = positions[:, end + 2 :]
    if rest.shape[1]:
        rest = rest - rest[0, 0] + end_position + 1
    return torch.cat([positions[:, :begin], positions[:, begin - 1 : begin], media, ends, rest], dim=1)


def media_features(engine_input: Mapping[str, Any]) -> list[MultiModalFeatureSpec]:
    """The media of a rendered prompt in the form in which vLLM's M-RoPE reads them."""
    features = []
    for modality, places in engine_input.get("mm_placeholders", {}).items():
        for index, place in enumerate(places):
            data = engine_input["mm_kwargs"][modality][index]
            features.append(MultiModalFeatureSpec(data=data, modality=modality, identifier="", mm_position=place))
    return features


def register() -> None:
    """Make the architecture known to vLLM in this process; again is no error."""
    ModelRegistry.register_model(THINKER_ARCHITECTURE, ThinkerNetwork)
