# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs for steps that hold prompts, beside those of decode steps.

vLLM records steps of mixed lengths only in place of decode steps, or between layers of a compiled network. Without a
graph a short prompt's step launches a thousand kernels one by one and takes five times as long as a decode step. It
delays the first audio. It knows vLLM's dispatcher of graphs, neither thinker nor talker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton_omni.vllm_hooks.shared.compat import AttentionCGSupport, CUDAGraphMode, GPUModelRunner

if TYPE_CHECKING:
    _Runner = GPUModelRunner
else:
    _Runner = object


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
