# SPDX-License-Identifier: Apache-2.0
"""Decoder layers of a recorded step of one token a sequence: seven kernels in place of twelve.

The layers are vLLM's, and keep their weights and their cache; other steps are computed by their own `forward`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from triton_omni.vllm_hooks.kernels.decode_attention import Cache, Projected, Rotation, decode_attention
from triton_omni.vllm_hooks.kernels.decode_product import (
    add_norm,
    gated_product,
    most_rows,
    reads_e4m3,
    shares,
    split_product,
)
from triton_omni.vllm_hooks.shared.compat import (
    Fp8PtpcOnlineLinearMethod,
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
    get_forward_context,
)


class Switch:
    """True while the launched step has one token a sequence and is to be recorded.

    Args:
        arrivals: see `decode_attention`; of all layers, which run one after another.
        layers: whether more of a layer than its attention is fused.
    """

    def __init__(self, arrivals: Tensor, *, layers: bool = True) -> None:
        self.on = False
        self.arrivals, self.layers = arrivals, layers


class Summands(NamedTuple):
    """Parts of a projection before the layers, yet to be summed."""

    parts: Tensor
    """[S, N, hidden] fp32."""
    bias: Tensor
    """[hidden]."""


class Matrix(NamedTuple):
    """A linear layer's matrix in the form that the products take."""

    weights: Tensor
    """[N, K], of the network's precision or E4M3."""
    scales: Tensor | None
    """[N] fp32 of E4M3."""

    @classmethod
    def of(cls, linear: Any) -> Matrix:
        """The matrix of vLLM's layer, which holds one of E4M3 transposed; without a copy."""
        if linear.weight.dtype == torch.float8_e4m3fn:
            return cls(linear.weight.T, linear.weight_scale.flatten())
        return cls(linear.weight, None)


class FusedProjection:
    """Stands in for the `forward` of a linear layer with a bias in front of the decoder layers.

    Args:
        projection: vLLM's, which returns no bias.
        switch: of the layers.
    """

    def __init__(self, projection: Any, switch: Switch) -> None:
        self._projection, self._switch, self._plain = projection, switch, projection.forward
        self._most_rows = most_rows(projection.weight.shape[0])

    def __call__(self, inputs: Tensor) -> Tensor | Summands:
        """Project inputs [N, K]."""
        if not self._switch.on or len(inputs) > self._most_rows:
            plain: Tensor = self._plain(inputs)
            return plain
        # Not early: the layers' kernels read parts of a step's layout at once, so it must be done when they begin.
        return Summands(split_product(inputs, self._projection.weight, early=False), self._projection.bias)


class FusedHead:
    """Stands in for the `forward` of vLLM's `LogitsProcessor`, for a head with enough tiles to fill a GPU.

    Args:
        processor: vLLM's.
        head: its matrix.
        switch: of the layers.
    """

    def __init__(self, processor: Any, head: Any, switch: Switch) -> None:
        self._head, self._switch = head, switch
        self._plain, self._vocabulary = processor.forward, processor.org_vocab_size
        parts, _ = shares(*head.weight.shape)
        self._most_rows = most_rows(head.weight.shape[1]) if parts == 1 else 0

    def __call__(self, head: Any, hidden_states: Tensor, *rest: Any) -> Any:
        """Logits [N, V] of hidden states [N, hidden]: fp32, not rounded to the head's own precision."""
        if head is not self._head or not self._switch.on or len(hidden_states) > self._most_rows:
            return self._plain(head, hidden_states, *rest)
        return split_product(hidden_states, head.weight)[0, :, : self._vocabulary]


class FusedAttention:
    """Stands in for the `forward` of a layer's attention.

    Args:
        attention: vLLM's.
        switch: of all layers.
    """

    def __init__(self, attention: Any, switch: Switch) -> None:
        self._attention, self._switch, self._plain = attention, switch, attention.forward

    def __call__(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """Return [N, hidden] of positions [3, N] and hidden states [N, hidden]."""
        if not self._switch.on:
            plain: Tensor = self._plain(positions=positions, hidden_states=hidden_states)
            return plain
        projected = Projected(self._attention.qkv_proj(hidden_states)[0][None])
        output: Tensor = self._attention.o_proj(self._seen(positions, projected))[0]
        return output

    def heads(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """Return the heads' output [N, heads x head_dim] before its projection, where the products are fused."""
        linear = self._attention.qkv_proj
        return self._seen(positions, Projected(split_product(hidden_states, *Matrix.of(linear)), linear.bias))

    def _seen(self, positions: Tensor, projected: Projected) -> Tensor:
        layer, cached = self._attention, self._attention.attn
        steps: Any = get_forward_context().attn_metadata
        step = steps[cached.layer_name]
        return decode_attention(
            projected,
            self._rotation(positions, cached.kv_cache),
            Cache(cached.kv_cache, step.block_table, step.seq_lens),
            self._switch.arrivals,
            heads=layer.num_heads,
            scale=layer.scaling,
        )

    def _rotation(self, positions: Tensor, cache: Tensor) -> Rotation:
        rotary = self._attention.rotary_emb
        time, height, width = rotary.mrope_section
        return Rotation(positions, rotary._match_cos_sin_cache_dtype(cache), (time, height, width))


class FusedLayer:
    """Stands in for the `forward` of a decoder layer whose attention is fused.

    Between such layers the hidden states travel as the parts of a sum [S, N, hidden], which the next norm adds up.
    """

    def __init__(self, layer: Any, attention: FusedAttention, switch: Switch) -> None:
        self._layer, self._attention, self._switch, self._plain = layer, attention, switch, layer.forward
        self._most_rows = most_rows(len(layer.input_layernorm.weight))

    def __call__(
        self, positions: Tensor, hidden_states: Tensor | Summands, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Parts of the hidden states, and the residual [N, hidden], updated in place."""
        if not self._switch.on or positions.shape[-1] > self._most_rows:
            plain: tuple[Tensor, Tensor] = self._plain(positions, hidden_states, residual)
            return plain
        layer = self._layer
        normed, residual = _first_norm(hidden_states, residual, layer.input_layernorm)
        seen = self._attention.heads(positions, normed)
        parts = split_product(seen, *Matrix.of(layer.self_attn.o_proj))
        normed = _add_norm(parts, residual, layer.post_attention_layernorm)
        gated = gated_product(normed, *Matrix.of(layer.mlp.gate_up_proj))
        return split_product(gated, *Matrix.of(layer.mlp.down_proj)), residual


class FusedNorm:
    """Replaces the `forward` of the final norm."""

    def __init__(self, norm: Any) -> None:
        self._norm, self._plain = norm, norm.forward

    def __call__(self, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        """Compute the plain norm, of hidden states in parts too."""
        if residual is None or hidden_states.ndim == residual.ndim:
            return self._plain(hidden_states, residual)
        return _add_norm(hidden_states, residual, self._norm), residual


def _first_norm(hidden_states: Tensor | Summands, residual: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    """The norm of a layer's inputs, and the residual with them."""
    if isinstance(hidden_states, Summands):
        parts, bias = hidden_states
        residual = torch.empty(parts.shape[1:], dtype=norm.weight.dtype, device=parts.device)
        return _add_norm(parts, residual, norm, bias), residual
    if residual is None:
        return norm(hidden_states), hidden_states
    return _add_norm(hidden_states, residual, norm), residual


def _add_norm(parts: Tensor, residual: Tensor, norm: Any, bias: Tensor | None = None) -> Tensor:
    return add_norm(parts, residual, norm.weight, norm.variance_epsilon, bias)


def fuse(network: nn.Module, decoder: Any, layers: list[Any], max_sequences: int) -> Switch:
    """Make each decoder layer of a network computable plain or fused; the returned switch chooses.

    If the products cannot read the quantised matrices of a layer, only its attention is replaced.

    Args:
        network: the whole of it.
        decoder, layers: see `fused_decode.decoder_of`.
        max_sequences: sequences of the largest decode step.
    """
    most = max_sequences * max(layer.self_attn.num_kv_heads for layer in layers)
    known_products = _products_are_known(layers)
    arrivals = torch.zeros(most, dtype=torch.int32, device=next(network.parameters()).device)
    switch = Switch(arrivals, layers=known_products)
    for layer in layers:
        attention = layer.self_attn.forward = FusedAttention(layer.self_attn, switch)
        if known_products:
            layer.forward = FusedLayer(layer, attention, switch)
    decoder.norm.forward = FusedNorm(decoder.norm)
    return switch


def fuse_ends(projection: Any, processor: Any, head: Any, switch: Switch) -> None:
    """Fuse the modules before and after fused layers too, if their matrices are plain."""
    plain_projection = isinstance(projection.quant_method, UnquantizedLinearMethod) and projection.bias is not None
    # Only fused layers take its unsummed parts.
    if switch.layers and plain_projection:
        projection.forward = FusedProjection(projection, switch)
    if isinstance(head.quant_method, UnquantizedEmbeddingMethod) and head.bias is None:
        processor.forward = FusedHead(processor, head, switch)


def _products_are_known(layers: list[Any]) -> bool:
    """True if the products can read all matrices, and only those with an added bias have one."""
    within = [
        linear for layer in layers for linear in (layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)
    ]
    linears = [*within, *(layer.self_attn.qkv_proj for layer in layers)]
    return all(map(_is_known, linears)) and all(linear.bias is None for linear in within)


def _is_known(linear: Any) -> bool:
    """True if the matrix is unquantised, or E4M3 from vLLM's own quantisation, which may be padded."""
    if not isinstance(linear.quant_method, Fp8PtpcOnlineLinearMethod):
        return isinstance(linear.quant_method, UnquantizedLinearMethod)
    weights, size = linear.weight.T, (linear.output_size_per_partition, linear.input_size_per_partition)
    return reads_e4m3(weights.device) and weights.shape == size and weights.is_contiguous()
