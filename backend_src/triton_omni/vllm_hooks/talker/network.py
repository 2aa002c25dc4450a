# SPDX-License-Identifier: Apache-2.0
"""The talker's network for vLLM: a Qwen2-style decoder, thinker-wide embeddings in, codec logits out.

It follows HF's `Qwen2_5OmniTalkerForConditionalGeneration`, and does not know the source of the embeddings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from triton_omni.checkpoint.reading import CheckpointError
from triton_omni.vllm_hooks.shared.compat import (
    AutoWeightsLoader,
    LlamaDecoderLayer,
    LogitsProcessor,
    ModelRegistry,
    ParallelLMHead,
    ReplicatedLinear,
    RMSNorm,
    SupportsMRoPE,
    VllmConfig,
    VocabParallelEmbedding,
    WeightsMapper,
    support_torch_compile,
)
from triton_omni.vllm_hooks.shared.named_weights import Weights, load_named

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from triton_omni.vllm_hooks.talker.step import TalkerStep

ARCHITECTURE = "TritonOmniTalker"
_PREFIX = "talker."
_STACKED: dict[str, dict[str, str | int]] = {
    "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
    "gate_up_proj": {"gate_proj": 0, "up_proj": 1},
}
"""Matrices that vLLM stacks into one, and their parts in the checkpoint by vLLM's name of the part."""


# Positions are [3, N], so tokens are their last dimension; vLLM's LlamaModel declares the first.
@support_torch_compile(dynamic_arg_dims={"positions": {-1: "b"}, "hidden": {0: "b"}})
class TalkerModel(nn.Module):
    """The decoder's layers and the table of codec ids, which is as wide as the thinker.

    The layers are vLLM's Llama layers with biases on query, key and value (`qkv_bias`), which is Qwen2. vLLM's own
    Qwen2 layers take hidden_size / heads as head size, unlike the published talker.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.embedding_size)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(vllm_config=vllm_config, prefix=f"{prefix}.layers.{number}")
            for number in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        """Last hidden states [N, hidden_size] of projected embeddings [N, hidden_size] at positions [3, N]."""
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        normed: Tensor = self.norm(hidden, residual)[0]
        return normed


class TalkerForCausalLM(nn.Module, SupportsMRoPE):
    """Projection, decoder with M-RoPE and codec head; the embedding is as wide as the thinker.

    Weights are the `talker.` part of the whole checkpoint; a missing or unexpected one stops the load.
    """

    supports_mrope = True
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            f"{_PREFIX}codec_head.": "lm_head.",
            _PREFIX: "",
            "thinker.": None,
            "token2wav.": None,
        },
        orig_to_new_stacked={
            f".{part}": (f".{stacked}", shard) for stacked, parts in _STACKED.items() for part, shard in parts.items()
        },
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self._checkpoint = Path(vllm_config.model_config.model)
        config = vllm_config.model_config.hf_config
        self.model = TalkerModel(vllm_config=vllm_config, prefix=f"{prefix}model")
        self.thinker_to_talker_proj = ReplicatedLinear(config.embedding_size, config.hidden_size, return_bias=False)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=f"{prefix}lm_head")
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.step: TalkerStep | None = None
        """Set by the runner before the first step."""

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """Lets vLLM skip files that hold nothing of the talker."""
        return not name.startswith(_PREFIX)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Codec ids [N] to vectors [N, embedding_size]."""
        embedded: Tensor = self.model.embed_tokens(input_ids)
        return embedded

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: None = None,
    ) -> Tensor:
        """Hidden states [N, hidden_size] of codec ids [N] at positions [3, N], conditioned by `step`.

        vLLM records this method as a CUDA graph, so it holds all that a decode step does before the draw. Launched one
        by one, these small operations would take longer than the network.
        """
        if self.step is None:
            raise RuntimeError("the talker's network runs before it was given its hidden rows")
        if self.step.decoding:
            embeds = self.step.begin_decode(input_ids, positions, cast(Tensor, self.model.embed_tokens.weight))
        else:
            embeds = self.step.condition(input_ids, self.embed_input_ids(input_ids))
        hidden: Tensor = self.model(positions, self.thinker_to_talker_proj(embeds))
        if self.step.decoding:
            self.step.finish_decode(self.logits_processor(self.lm_head, hidden))
        return hidden

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return codec logits [N, vocab_size] of hidden states [N, hidden_size]; in a decode step, drawn ids [N]."""
        if self.step is not None and self.step.decoding:
            return self.step.drawn[: hidden_states.shape[0]]
        logits: Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[Tensor, int]:
        """Plain text positions [3, P] and delta 0; the runner replaces them by the thinker's positions."""
        return torch.arange(len(input_tokens)).expand(3, -1), 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the `talker.` weights, each exactly once.

        vLLM counts a stacked matrix as loaded after one of its parts, so this counts the checkpoint's names.

        Raises:
            CheckpointError: weights are missing, or one does not have the network's shape.
            ValueError: a weight is unexpected.
        """
        missing = self._checkpoint_names()

        def counted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                missing.discard(name)
                yield name, tensor

        def load(named: Weights) -> set[str]:
            found: set[str] = AutoWeightsLoader(self).load_weights(named, mapper=self.hf_to_vllm_mapper)
            return found

        loaded = load_named(load, counted(), self._checkpoint)
        if missing:
            raise CheckpointError(f"the checkpoint lacks talker weights: {', '.join(sorted(missing))}")
        return loaded

    def _checkpoint_names(self) -> set[str]:
        """The checkpoint's names of all parameters."""
        names: set[str] = set()
        for name, _ in self.named_parameters():
            stacked = next((part for part in _STACKED if f".{part}." in name), None)
            parts = [name.replace(stacked, part) for part in _STACKED[stacked]] if stacked else [name]
            names.update(_PREFIX + part.replace("lm_head.", "codec_head.") for part in parts)
        return names


def talker_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The talker's part of a whole checkpoint's config, as vLLM's `hf_overrides` wants it.

    vLLM also tries the override on a config without any parts, to learn the model type; that config stays unchanged.
    """
    talker: PreTrainedConfig | None = getattr(config, "talker_config", None)
    if talker is None:
        return config
    talker.architectures = [ARCHITECTURE]
    talker.qkv_bias = True
    return talker


def register_talker() -> None:
    """Make the network known to vLLM in this process; vLLM inspects a class object without a subprocess."""
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, TalkerForCausalLM)
