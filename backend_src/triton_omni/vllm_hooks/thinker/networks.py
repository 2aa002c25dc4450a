# SPDX-License-Identifier: Apache-2.0
"""The thinker's network under a name of this project: vLLM's own, with HF's positions.

vLLM inspects the classes of its own registry in a child process, which lacks the preparations of `compat`. It inspects
a registered class object in this process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from triton_omni.vllm_hooks.shared.compat import (
    MULTIMODAL_REGISTRY,
    EncoderCudaGraphConfig,
    ModelRegistry,
    MultiModalFeatureSpec,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5OmniThinkerDummyInputsBuilder,
    Qwen2_5OmniThinkerForConditionalGeneration,
    SupportsEncoderCudaGraph,
    VllmConfig,
    build_mm_input_norm,
    gpu_sync_allowed,
    merge_interleaved_embeddings,
)
from triton_omni.vllm_hooks.shared.named_weights import Weights, load_named
from triton_omni.vllm_hooks.shared.platform import UnsupportedEngineError
from triton_omni.vllm_hooks.thinker.media_processor import MediaProcessor, ProcessingInfo
from triton_omni.vllm_hooks.thinker.prompt_media import Placed, TimeScale, prompt_positions

THINKER_ARCHITECTURE = "TritonOmniThinker"

_OF_THE_SAME_TOWER: Any = Qwen2_5_VLForConditionalGeneration
"""Its methods read `visual` alone, so they hold for any network that has one."""


class VisionGraphs(SupportsEncoderCudaGraph):
    """Methods that vLLM asks of a network with recorded image passes, for one whose `visual` is Qwen2.5-VL's tower.

    vLLM has them for Qwen2.5-VL, not for Qwen2.5-Omni. Put it after vLLM's network in the bases, whose `__init__` a
    protocol would hide. Videos are not recorded: they are so long that launching them takes less time than running
    them, and vLLM does not look whether their frames have room in what was recorded.
    """

    is_multimodal_pruning_enabled = False

    get_input_modality = _OF_THE_SAME_TOWER.get_input_modality
    get_encoder_cudagraph_budget_range = _OF_THE_SAME_TOWER.get_encoder_cudagraph_budget_range
    get_encoder_cudagraph_item_specs = _OF_THE_SAME_TOWER.get_encoder_cudagraph_item_specs
    select_encoder_cudagraph_items = _OF_THE_SAME_TOWER.select_encoder_cudagraph_items
    prepare_encoder_cudagraph_capture_inputs = _OF_THE_SAME_TOWER.prepare_encoder_cudagraph_capture_inputs
    prepare_encoder_cudagraph_replay_buffers = _OF_THE_SAME_TOWER.prepare_encoder_cudagraph_replay_buffers
    encoder_cudagraph_forward = _OF_THE_SAME_TOWER.encoder_cudagraph_forward
    encoder_eager_forward = _OF_THE_SAME_TOWER.encoder_eager_forward
    _get_grid_thw_by_modality = _OF_THE_SAME_TOWER._get_grid_thw_by_modality
    _get_pixel_values_by_modality = _OF_THE_SAME_TOWER._get_pixel_values_by_modality

    def get_max_frames_per_video(self) -> int:
        """Frames of the longest medium: an image has one."""
        return 1

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """Qwen2.5-VL's, for images alone."""
        config: EncoderCudaGraphConfig = _OF_THE_SAME_TOWER.get_encoder_cudagraph_config(self)
        return replace(config, modalities=["image"])


@MULTIMODAL_REGISTRY.register_processor(
    MediaProcessor,
    info=ProcessingInfo,
    dummy_inputs=Qwen2_5OmniThinkerDummyInputsBuilder,
)
class ThinkerNetwork(Qwen2_5OmniThinkerForConditionalGeneration, VisionGraphs):
    """Qwen2.5-Omni's thinker: text, image, sound and video in, logits and last hidden states out.

    Pixels come to the device as bytes and are normalised there, as in vLLM's Qwen2.5-VL with the same vision tower. On
    the host that takes longer than scaling, and four times as many bytes are copied.
    """

    supports_mm_device_do_normalize = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.visual.input_norm = build_mm_input_norm(vllm_config.model_config)
        self._checkpoint = Path(vllm_config.model_config.model)

    def load_weights(self, weights: Weights) -> set[str]:
        """Load the `thinker.` weights.

        Raises:
            CheckpointError: one does not have the network's shape.
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

    def embed_input_ids(
        self, input_ids: Tensor, multimodal_embeddings: Any = None, *, is_multimodal: Tensor | None = None
    ) -> Tensor:
        """Return the embeddings [N, H] of a step's tokens [N], each medium's in the places of its kind.

        A step may begin with the end of a chunk's sound and end with the next pictures. vLLM takes these for media one
        after another, and gives the sound the embeddings of the pictures.
        """
        kinds = {getattr(embedding, "modality", None) for embedding in multimodal_embeddings or ()}
        if is_multimodal is None or not kinds >= {"audio", "video"}:
            return super().embed_input_ids(input_ids, multimodal_embeddings, is_multimodal=is_multimodal)
        with gpu_sync_allowed():
            ids = input_ids.cpu()
        language: Any = self.get_language_model()
        embeddings = self._embed_text_input_ids(input_ids, language.embed_input_ids, is_multimodal=is_multimodal)
        is_video, is_audio = (
            is_multimodal & (ids == token) for token in (self.config.video_token_index, self.config.audio_token_index)
        )
        return merge_interleaved_embeddings(embeddings, multimodal_embeddings, is_video, is_audio, is_multimodal)

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[Tensor, int]:
        """Return M-RoPE positions int64 [3, P] of a prompt, and the offset of the reply's from their indices."""
        config: Any = self.config
        scale = TimeScale(config.position_id_per_seconds, config.seconds_per_chunk)
        # By numpy, as in `preprocessed.extend_positions`.
        media = _placed(mm_features, config.vision_config.spatial_merge_size)
        positions = prompt_positions(np.array(input_tokens), media, config.video_token_id, scale)
        return torch.from_numpy(positions), int(positions.max()) + 1 - len(input_tokens)


def _placed(features: list[MultiModalFeatureSpec], merge: int) -> list[Placed]:
    """The media in the order of the prompt. The placeholders of a heard video and of its sound begin at one token."""
    media = {feature.mm_position.offset: _of(feature, merge) for feature in features if feature.modality != "audio"}
    for feature in features:
        place = feature.mm_position
        if feature.modality == "audio" and place.offset not in media:
            media[place.offset] = Placed(place.offset, place.length)
    return [media[begin] for begin in sorted(media)]


def _of(feature: MultiModalFeatureSpec, merge: int) -> Placed:
    data: Any = feature.data
    steps, rows, columns = data[f"{feature.modality}_grid_thw"].data.tolist()
    place, grid = feature.mm_position, (steps, rows // merge, columns // merge)
    if feature.modality == "image":
        return Placed(place.offset, place.length, grid)
    seconds, is_heard = data["second_per_grid_ts"].data.item(), bool(data["use_audio_in_video"].data)
    return Placed(place.offset, place.length, grid, seconds, is_heard)


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


def media_features(engine_input: Mapping[str, Any]) -> list[MultiModalFeatureSpec]:
    """The media of a rendered prompt in the form in which vLLM's M-RoPE reads them."""
    features = []
    for modality, places in engine_input.get("mm_placeholders", {}).items():
        for index, place in enumerate(places):
            data = engine_input["mm_kwargs"][modality][index]
            features.append(MultiModalFeatureSpec(data=data, modality=modality, identifier="", mm_position=place))
    return features


def register() -> None:
    """Make the architecture known to vLLM in this process; may be called again."""
    ModelRegistry.register_model(THINKER_ARCHITECTURE, ThinkerNetwork)
