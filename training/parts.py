# SPDX-License-Identifier: Apache-2.0
"""HF's own modules of the four networks, with random weights."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from training.sizes import Sizes, omni_config

Part = Literal["thinker", "talker", "dit", "vocoder"]
PREFIXES: dict[Part, str] = {
    "thinker": "thinker.",
    "talker": "talker.",
    "dit": "token2wav.code2wav_dit_model.",
    "vocoder": "token2wav.code2wav_bigvgan_model.",
}
"""Prefixes of the names of a part's weights in a checkpoint."""


def part(name: Part, sizes: Sizes) -> nn.Module:
    """A network as HF has it, in fp32."""
    config: Any = omni_config(sizes)
    from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as hf

    kinds: dict[Part, tuple[Any, Any]] = {
        "thinker": (hf.Qwen2_5OmniThinkerForConditionalGeneration, config.thinker_config),
        "talker": (hf.Qwen2_5OmniTalkerForConditionalGeneration, config.talker_config),
        "dit": (hf.Qwen2_5OmniToken2WavDiTModel, config.token2wav_config.dit_config),
        "vocoder": (hf.Qwen2_5OmniToken2WavBigVGANModel, config.token2wav_config.bigvgan_config),
    }
    kind, its_config = kinds[name]
    module: nn.Module = kind._from_config(its_config, attn_implementation="sdpa")
    return module
