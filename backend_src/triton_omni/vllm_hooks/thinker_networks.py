# SPDX-License-Identifier: Apache-2.0
"""The thinker's network under a name of this project; vLLM's own code, unchanged.

vLLM inspects the classes of its own registry in a child process, where the preparations of `compat` do not
hold; a registered class object is inspected in this process.
"""

from __future__ import annotations

from triton_omni.vllm_hooks.compat import (
    MULTIMODAL_REGISTRY,
    ModelRegistry,
    Qwen2_5OmniThinkerDummyInputsBuilder,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2_5OmniThinkerMultiModalProcessor,
    Qwen2_5OmniThinkerProcessingInfo,
)

THINKER_ARCHITECTURE = "TritonOmniThinker"


@MULTIMODAL_REGISTRY.register_processor(
    Qwen2_5OmniThinkerMultiModalProcessor,
    info=Qwen2_5OmniThinkerProcessingInfo,
    dummy_inputs=Qwen2_5OmniThinkerDummyInputsBuilder,
)
class ThinkerNetwork(Qwen2_5OmniThinkerForConditionalGeneration):
    """Qwen2.5-Omni's thinker: text, image, sound and video in, logits and last hidden states out."""


def register() -> None:
    """Make the architecture known to vLLM in this process; again is no error."""
    ModelRegistry.register_model(THINKER_ARCHITECTURE, ThinkerNetwork)
