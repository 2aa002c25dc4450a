# SPDX-License-Identifier: Apache-2.0
"""Recorded decode steps by kernels of this project's own; all other steps stay vLLM's.

The layers of both networks are vLLM's, and keep their weights and their cache. What is replaced is how a recorded step
of one token a sequence computes them: four kernels and a product in place of twelve. It knows vLLM's layers, neither
thinker nor talker.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn

from triton_omni.vllm_hooks.compat import (
    BatchDescriptor,
    GPUModelRunner,
    LlamaDecoderLayer,
    MRotaryEmbedding,
    Qwen2DecoderLayer,
    UnquantizedLinearMethod,
    get_forward_context,
)

if TYPE_CHECKING:
    from triton_omni.vllm_hooks.decode_attention_kernels import Rotation

    _Runner = GPUModelRunner
else:
    _Runner = object

FUSED_DECODE: Final = "fused_decode"
"""Key of vLLM's `additional_config`: whether decode steps are recorded with fused kernels."""
_ATTENTION: Final = "FLASH_ATTN"
"""The backend whose cache and lengths the kernel reads."""
_HALF_PRECISION: Final = (torch.bfloat16, torch.float16)

logger = logging.getLogger(__name__)


class Switch:
    """Whether the step that is launched is one of one token a sequence, to be recorded.

    Args:
        arrivals: see `decode_attention`; of all layers, which run one after another.
    """

    def __init__(self, arrivals: Tensor) -> None:
        self.on = False
        self.arrivals = arrivals


class FusedAttention:
    """Stands in for the `forward` of a layer's attention."""

    def __init__(self, attention: Any, switch: Switch) -> None:
        self._attention, self._switch, self._plain = attention, switch, attention.forward

    def __call__(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """[N, hidden] of positions [3, N] and hidden states [N, hidden]."""
        if not self._switch.on:
            plain: Tensor = self._plain(positions=positions, hidden_states=hidden_states)
            return plain
        output: Tensor = self._attention.o_proj(self.heads(positions, hidden_states))[0]
        return output

    def heads(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """What the heads see [N, heads x head_dim], not yet projected."""
        from triton_omni.vllm_hooks.decode_attention_kernels import Cache, decode_attention

        layer, cached = self._attention, self._attention.attn
        steps: Any = get_forward_context().attn_metadata
        step = steps[cached.layer_name]
        projected, _ = layer.qkv_proj(hidden_states)
        return decode_attention(
            projected,
            self._rotation(positions, projected),
            Cache(cached.kv_cache, step.block_table, step.seq_lens),
            self._switch.arrivals,
            heads=layer.num_heads,
            scale=layer.scaling,
        )

    def _rotation(self, positions: Tensor, projected: Tensor) -> Rotation:
        from triton_omni.vllm_hooks.decode_attention_kernels import Rotation

        rotary = self._attention.rotary_emb
        time, height, width = rotary.mrope_section
        return Rotation(positions, rotary._match_cos_sin_cache_dtype(projected), (time, height, width))


class FusedLayer:
    """Stands in for the `forward` of a decoder layer, its attention being fused.

    Between such layers the hidden states travel as the parts of a sum [S, N, hidden], which the next norm adds up.
    """

    def __init__(self, layer: Any, attention: FusedAttention, switch: Switch) -> None:
        self._layer, self._attention, self._switch, self._plain = layer, attention, switch, layer.forward

    def __call__(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Parts of the hidden states, and the residual [N, hidden], updated in place."""
        from triton_omni.split_kernels import split_product
        from triton_omni.vllm_hooks.decode_product_kernels import MOST_ROWS, gated_product

        if not self._switch.on or positions.shape[-1] > MOST_ROWS:
            plain: tuple[Tensor, Tensor] = self._plain(positions, hidden_states, residual)
            return plain
        layer = self._layer
        if residual is None:
            hidden_states, residual = layer.input_layernorm(hidden_states), hidden_states
        else:
            hidden_states = _add_norm(hidden_states, residual, layer.input_layernorm)
        seen = self._attention.heads(positions, hidden_states)
        hidden_states = _add_norm(
            split_product(seen, layer.self_attn.o_proj.weight), residual, layer.post_attention_layernorm
        )
        gated = gated_product(hidden_states, layer.mlp.gate_up_proj.weight)
        return split_product(gated, layer.mlp.down_proj.weight), residual


class FusedNorm:
    """Stands in for the `forward` of the norm behind the layers."""

    def __init__(self, norm: Any) -> None:
        self._norm, self._plain = norm, norm.forward

    def __call__(self, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        """As the plain norm, of hidden states in parts too."""
        if residual is None or hidden_states.ndim == residual.ndim:
            return self._plain(hidden_states, residual)
        return _add_norm(hidden_states, residual, self._norm), residual


def _add_norm(parts: Tensor, residual: Tensor, norm: Any) -> Tensor:
    from triton_omni.vllm_hooks.decode_product_kernels import add_norm

    return add_norm(parts, residual, norm.weight, norm.variance_epsilon)


class FusedDecodeMixin(_Runner):
    """Records decode steps with fused kernels where `additional_config` asks for it and the network allows it.

    Put it before the platform's runner in the bases.
    """

    _fused: Switch | None = None

    @property
    def fuses_decode_steps(self) -> bool:
        """Whether it does; known once the network is loaded."""
        return self._fused is not None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the network, and let its layers choose how a step is computed."""
        super().load_model(*args, **kwargs)
        if not cast(dict[str, bool], self.vllm_config.additional_config).get(FUSED_DECODE):
            return
        network = self.get_model()
        hindrance = why_not_fused(network, cast(torch.dtype, self.model_config.dtype))
        if hindrance is not None:
            logger.warning("decode steps are not fused: %s", hindrance)
            return
        self._fused = fuse(network, self.max_num_reqs)

    def _warmup_and_capture(self, desc: BatchDescriptor, *args: Any, **kwargs: Any) -> None:
        """Record a step; a step of one token a sequence with the fused kernels, run once before to compile them."""
        if self._fused is None or not desc.uniform:
            super()._warmup_and_capture(desc, *args, **kwargs)
            return
        self._fused.on = True
        try:
            super()._warmup_and_capture(desc, *args, **{"num_warmups": 1, **kwargs})
        finally:
            self._fused.on = False


def fuse(network: nn.Module, max_sequences: int) -> Switch:
    """Let each decoder layer of a network be computed in either way; the switch that is returned says in which.

    Where a layer's matrices are quantised, only its attention has another way.
    """
    decoder, layers = _decoder(network)
    most = max_sequences * max(layer.self_attn.num_kv_heads for layer in layers)
    switch = Switch(torch.zeros(most, dtype=torch.int32, device=next(network.parameters()).device))
    plain_products = _products_are_plain(layers)
    for layer in layers:
        attention = layer.self_attn.forward = FusedAttention(layer.self_attn, switch)
        if plain_products:
            layer.forward = FusedLayer(layer, attention, switch)
    decoder.norm.forward = FusedNorm(decoder.norm)
    return switch


def why_not_fused(network: nn.Module, dtype: torch.dtype) -> str | None:
    """What the kernels do not compute of a network; None = they compute it."""
    _, layers = _decoder(network)
    if dtype not in _HALF_PRECISION:
        return f"they are of half precision, the network is {dtype}"
    if not layers:
        return "the network has no decoder layers of a known kind"
    return next((reason for reason in map(_why_not, layers) if reason is not None), None)


def _why_not(layer: Any) -> str | None:
    attention, rotary = layer.self_attn.attn, layer.self_attn.rotary_emb
    backend, window = attention.attn_backend.get_name(), getattr(attention.impl, "sliding_window", None)
    if backend != _ATTENTION:
        return f"attention is {backend}, not {_ATTENTION}"
    if attention.kv_cache_dtype != "auto":
        return f"the cache is {attention.kv_cache_dtype}"
    if window not in (None, (-1, -1)):
        return f"attention sees a window of {window}"
    if not isinstance(rotary, MRotaryEmbedding) or not rotary.mrope_section or rotary.mrope_interleaved:
        return "positions are not of three axes, one after another"
    if not rotary.is_neox_style or rotary.rotary_dim != rotary.head_size:
        return "the rotation is not of two halves of a head"
    return None


def _products_are_plain(layers: list[Any]) -> bool:
    """Whether the matrices that the kernels multiply by are as the checkpoint has them, without bias."""
    matrices = [
        matrix for layer in layers for matrix in (layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)
    ]
    return all(isinstance(matrix.quant_method, UnquantizedLinearMethod) and matrix.bias is None for matrix in matrices)


def _decoder(network: nn.Module) -> tuple[Any, list[Any]]:
    """The part of a network that holds its decoder layers and the norm behind them, and the layers."""
    for part in network.modules():
        layers = getattr(part, "layers", None)
        if isinstance(layers, nn.ModuleList) and isinstance(layers[0], LlamaDecoderLayer | Qwen2DecoderLayer):
            return part, list(layers)
    return None, []
