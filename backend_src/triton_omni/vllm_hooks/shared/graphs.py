# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs beside those of decode steps: of steps that hold prompts, and of the vision tower's passes over images.

Without a graph a short prompt's step launches a thousand kernels one by one and takes five times as long as a decode
step, which delays the first audio. vLLM records steps of mixed lengths only in place of decode steps, or between layers
of a compiled network. A pass over images launches as many, and only where the host is free do they keep up with the
GPU. vLLM records such towers for networks that say how, as the thinker's does. This module knows vLLM's dispatcher of
graphs, neither thinker nor talker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton_omni.core.settings import EngineSettings
from triton_omni.vllm_hooks.shared.compat import AttentionCGSupport, CUDAGraphMode, GPUModelRunner

if TYPE_CHECKING:
    _Runner = GPUModelRunner
else:
    _Runner = object

IMAGES_A_PASS = 8
"""Images that share a recorded pass at most; vLLM shares more of them out."""


def image_budgets(settings: EngineSettings) -> list[int]:
    """Prompt tokens of the images of a pass that gets a CUDA graph, up to `max_graph_tokens`.

    An image costs what the next of these sizes does: at most a third more, from 256 tokens on.
    """
    sizes = [*range(64, 257, 64), *range(384, 1025, 128), *range(1280, 2049, 256)]
    return [size for size in sizes if size <= settings.max_graph_tokens]


def vision_graphs(settings: EngineSettings) -> dict[str, Any]:
    """vLLM's compilation settings that have images recorded; nothing where no size is to be.

    With `deterministic` none is: a recorded pass's attention plans for its size, and that depends on what else came.
    To a network without a vision tower these settings mean nothing.
    """
    budgets = image_budgets(settings)
    if settings.deterministic or not budgets:
        return {}
    return {
        "cudagraph_mm_encoder": True,
        "encoder_cudagraph_token_budgets": budgets,
        "encoder_cudagraph_max_vision_items_per_batch": IMAGES_A_PASS,
        "encoder_cudagraph_max_frames_per_batch": IMAGES_A_PASS,
    }


class PrefillGraphsMixin(_Runner):
    """Records every size of `cudagraph_capture_sizes` for steps of mixed lengths too, where attention allows it.

    That is wanted where the sizes go beyond `max_num_seqs`, which no decode step does.

    Put it before the platform's runner in the bases. Attention that plans for the longest query on the host
    (FlashAttention 2) does not allow it; such steps then run kernel by kernel, as in vLLM.
    """

    def _check_and_update_cudagraph_mode(
        self, attention_backends: list[Any], kv_cache_groups: list[Any], is_profiling: bool = False
    ) -> None:
        """Enter the keys of the additional graphs where vLLM enters those of its own."""
        super()._check_and_update_cudagraph_mode(attention_backends, kv_cache_groups, is_profiling)
        dispatcher, sizes = self.cudagraph_dispatcher, self.compilation_config.cudagraph_capture_sizes or [0]
        if dispatcher.cudagraph_mode != CUDAGraphMode.FULL_DECODE_ONLY or sizes[-1] <= self.max_num_reqs:
            return
        supports = [
            backend.get_builder_cls().get_cudagraph_support(self.vllm_config, group.kv_cache_spec)
            for backends, group in zip(attention_backends, kv_cache_groups, strict=True)
            for backend in backends
        ]
        if all(support == AttentionCGSupport.ALWAYS for support in supports):
            for size in sizes:
                key = dispatcher._create_padded_batch_descriptor(size, uniform_decode=False, has_lora=False)
                dispatcher.add_cudagraph_key(CUDAGraphMode.FULL, key)
