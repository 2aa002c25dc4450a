# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of steps with prompts, and of the vision tower's passes over images, beside those of decode steps.

Without a graph a short prompt's step launches a thousand kernels one by one and takes five times as long as a decode
step, which delays the first audio. vLLM records steps of mixed lengths only in place of decode steps, or between layers
of a compiled network. A pass over images launches as many kernels, and a busy host cannot launch them as fast as the
GPU runs them. vLLM records the towers of networks that implement its protocol, as the thinker's does. This module
knows vLLM's dispatcher of graphs, neither thinker nor talker.
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
"""Maximum images of a recorded pass; vLLM divides more of them among several passes."""


def image_budgets(settings: EngineSettings) -> list[int]:
    """Prompt tokens of the images of a pass that gets a CUDA graph, up to `max_graph_tokens`.

    An image costs as much as the next of these sizes, which is at most a third larger from 256 tokens on.
    """
    sizes = [*range(64, 257, 64), *range(384, 1025, 128), *range(1280, 2049, 256)]
    return [size for size in sizes if size <= settings.max_graph_tokens]


def vision_graphs(settings: EngineSettings) -> dict[str, Any]:
    """Return vLLM's compilation settings that record passes over images; empty if no size is to be recorded.

    With `deterministic` none is recorded: attention plans for the size of the pass, which depends on the other images.
    A network without a vision tower ignores these settings.
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

    Sizes above `max_num_seqs`, which no decode step has, ask for this.

    Put it before the platform's runner in the bases. Attention that plans for the longest query on the host
    (FlashAttention 2) does not allow it; such steps then run kernel by kernel, as in vLLM.
    """

    def _check_and_update_cudagraph_mode(
        self, attention_backends: list[Any], kv_cache_groups: list[Any], is_profiling: bool = False
    ) -> None:
        """Register the keys of the additional graphs together with vLLM's own."""
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
