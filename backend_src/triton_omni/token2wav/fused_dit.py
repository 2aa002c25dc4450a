# SPDX-License-Identifier: Apache-2.0
"""The DiT's velocity in half precision with few launches: four matrix products and three fused kernels a layer.

The same function as `DiT.forward`, its reference. The residual stream, norms, softmax and the solver's state stay in
float32; inputs and outputs of matrix products are in half precision. Products of few rows are our own kernels
(`layer_kernels.py`), all others a library's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triton_omni.token2wav.attention import ROTARY_HEADS, Rotary
from triton_omni.token2wav.attention_kernels import block_attention, leave_past
from triton_omni.token2wav.batching import BlockLayout, Blocks
from triton_omni.token2wav.dit import FINAL_PARTS, LAYER_PARTS, NORM_EPS, DiT, Layer
from triton_omni.token2wav.kernels import residual_norm
from triton_omni.token2wav.layer_kernels import LIBRARY, Tiling, fit, product, tilings_for
from triton_omni.token2wav.ode import Velocity
from triton_omni.token2wav.window_cache import WindowKVCache


@dataclass(frozen=True)
class _Projection:
    """Weight [out, in] and bias [out] of a linear layer."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, *linears: nn.Module, dtype: torch.dtype) -> _Projection:
        """Join linear layers of one input into one, their outputs side by side."""
        parts = [cast(nn.Linear, linear) for linear in linears]
        weight = torch.cat([part.weight for part in parts]).to(dtype)
        return cls(weight, torch.cat([part.bias for part in parts]).to(dtype))

    def __call__(self, rows: Tensor, tiling: Tiling | None = None) -> Tensor:
        """[R, out], or parts of it; see `layer_kernels.product`."""
        if tiling is not None:
            return product(rows, self.weight, self.bias, tiling)
        return torch.addmm(self.bias, rows, self.weight.t())

    def gelu(self, rows: Tensor, tiling: Tiling | None) -> Tensor:
        """The same followed by a GELU (tanh form); on a GPU within the product's epilogue."""
        if tiling is not None:
            return product(rows, self.weight, self.bias, tiling, gelu=True)
        if rows.is_cuda:
            return torch._addmm_activation(self.bias, rows, self.weight.t(), use_gelu=True)
        return F.gelu(self(rows), approximate="tanh")


@dataclass(frozen=True)
class _FusedLayer:
    qkv: _Projection
    out: _Projection
    enter: _Projection
    leave: _Projection
    reach: tuple[int, int]


class FusedDiT:
    """Replaces a DiT at every evaluation (`sampler.VelocityNetwork`).

    Args:
        dit: its products are copied, and can then be freed.
        dtype: of the matrix products.
    """

    def __init__(self, dit: DiT, dtype: torch.dtype) -> None:
        self._dit = dit
        self._dtype = dtype
        self._heads = dit.config.num_heads
        self._tiled = fit(dit.rotary_frequencies.device, dtype)
        self._layers = [self._fuse(cast(Layer, layer)) for layer in dit.transformer_blocks]
        self._project_out = _Projection.of(dit.proj_out, dtype=dtype)

    def velocity_for(self, condition: Tensor, modulation: Tensor, layout: BlockLayout, past: WindowKVCache) -> Velocity:
        """See `DiT.velocity_for`; the pages of `past` are in the same dtype as the matrix products."""
        rotary = self._dit.rotary(layout.positions)
        return lambda number, state: self.evaluate(
            number, state, condition, modulation, rotary=rotary, blocks=layout.blocks, past=past
        ).float()

    def evaluate(
        self,
        number: int,
        state: Tensor,
        condition: Tensor,
        modulation: Tensor,
        *,
        rotary: Rotary,
        blocks: Blocks,
        past: WindowKVCache,
    ) -> Tensor:
        """See `DiT.forward`. A condition of twice the rows takes the state for each half; the velocity has the dtype
        of the products.
        """
        # The state's few channels stay in float32: the noise of half precision would be audible.
        projected = self._dit.input_embed.mel(state)
        halves = condition.view(-1, *projected.shape)
        hidden = (halves + projected).flatten(0, 1)
        angles = (rotary.cos[:, 0], rotary.sin[:, 0])
        norms = modulation[number, :-FINAL_PARTS].view(-1, LAYER_PARTS, modulation.shape[2])
        tilings = tilings_for(len(hidden)) if self._tiled else LIBRARY
        early = tilings is not LIBRARY
        branch: Tensor | None = None
        gate = norms[0, 2]
        for place, (layer, parts) in enumerate(zip(self._layers, norms, strict=True)):
            shift, scale, attention_gate, ff_shift, ff_scale, ff_gate = parts.unbind(0)
            normed = self._residual_norm(hidden, branch, gate, shift, scale, early=early)
            qkv, layer_past = layer.qkv(normed, tilings.qkv), past.at(number, place)
            mixed = block_attention(
                qkv,
                angles,
                blocks,
                layer.reach,
                layer_past,
                block_size=self._dit.config.block_size,
                heads=self._heads,
                rotary_heads=ROTARY_HEADS,
                early=early,
            )
            if layer_past is not None:
                leave_past(qkv, blocks, layer_past, heads=self._heads, early=early)
            out = layer.out(mixed, tilings.out)
            normed = self._residual_norm(hidden, out, attention_gate, ff_shift, ff_scale, early=early)
            branch, gate = layer.leave(layer.enter.gelu(normed, tilings.enter), tilings.leave), ff_gate
        scale, shift = modulation[number, -FINAL_PARTS:].unbind(0)
        return self._project_out(self._residual_norm(hidden, branch, gate, shift, scale, early=early))

    def _residual_norm(
        self, hidden: Tensor, branch: Tensor | None, gate: Tensor, shift: Tensor, scale: Tensor, *, early: bool
    ) -> Tensor:
        return residual_norm(hidden, branch, gate, shift, scale, eps=NORM_EPS, dtype=self._dtype, early=early)

    def _fuse(self, layer: Layer) -> _FusedLayer:
        attention, forward = layer.attn, layer.ff.ff
        return _FusedLayer(
            qkv=_Projection.of(attention.to_q, attention.to_k, attention.to_v, dtype=self._dtype),
            out=_Projection.of(attention.to_out[0], dtype=self._dtype),
            enter=_Projection.of(forward[0], dtype=self._dtype),
            leave=_Projection.of(forward[2], dtype=self._dtype),
            reach=attention.reach,
        )
