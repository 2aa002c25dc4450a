# SPDX-License-Identifier: Apache-2.0
"""The diffusion transformer: velocity of the flow from noise to mel frames, given codec codes and a voice.

Works on ragged batches of rows (`batching.BlockLayout`). Parts that are constant over the ODE (voice, codes, adaptive
norms of the known times, rotary angles) are computed once, outside `forward`. Parameter names are the checkpoint's (HF:
`Qwen2_5OmniToken2WavDiTModel`). Independent of solvers and streams.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triton_omni.checkpoint.facts import DitConfig
from triton_omni.token2wav.attention import Attention, Before, Rotary, rotate_
from triton_omni.token2wav.batching import BlockLayout
from triton_omni.token2wav.ecapa import Ecapa
from triton_omni.token2wav.ode import Velocity
from triton_omni.token2wav.window_cache import LayerKVCache, WindowCachePool, WindowKVCache

NORM_EPS = 1e-6
TIME_FREQUENCIES = 256
TIME_SCALE = 1000.0
LAYER_PARTS = 6
FINAL_PARTS = 2
UNCONDITIONAL_CODE = 0
"""Code that replaces every code in the unconditional half of guidance."""


@dataclass(frozen=True)
class Voice:
    """A speaker's part of the input projection, bias included."""

    halves: Tensor
    """[2, H]: the conditional half, and the unconditional half with speaker embedding and reference mel zeroed, and
    code 0.
    """


class DiT(nn.Module):
    """Velocity network.

    Args:
        config: sizes from the checkpoint.
        attention: `attention.block_attention` or the plain one.
    """

    def __init__(self, config: DitConfig, attention: Attention) -> None:
        super().__init__()
        self.config = config
        self.time_embed = TimeEmbedding(config.hidden_size)
        self.text_embed = CodeEmbedding(config)
        self.input_embed = InputEmbedding(config)
        self.transformer_blocks = nn.ModuleList(
            Layer(config, attention, (int(i in config.look_backward_layers), int(i in config.look_ahead_layers)))
            for i in range(config.num_layers)
        )
        self.norm_out = AdaptiveNorm(config.hidden_size, FINAL_PARTS)
        self.proj_out = nn.Linear(config.hidden_size, config.mel_dim)
        frequencies = config.rope_theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        self.rotary_frequencies: Tensor
        self.register_buffer("rotary_frequencies", frequencies, persistent=False)

    def free_products(self) -> None:
        """Free the weights of attention and feed-forward, which only `forward` reads; do not call it after this."""
        for layer in self.transformer_blocks:
            del layer.attn, layer.ff

    def voice(self, speaker: Tensor, reference_mel: Tensor) -> Voice:
        """Encode a voice once for all its streams.

        Args:
            speaker: [speaker_dim] fp32, the speaker embedding.
            reference_mel: [T, M] fp32, mel frames of the speaker.
        """
        unspoken = self.input_embed.codes(self.text_embed.codec_embed.weight[UNCONDITIONAL_CODE])
        nobody = self.input_embed.voice(torch.zeros_like(speaker), torch.zeros_like(reference_mel))
        return Voice(torch.stack([self.input_embed.voice(speaker, reference_mel), nobody + unspoken]))

    def codes(self) -> Tensor:
        """Return the part of the input projection of every code: [codes, H]."""
        return self.input_embed.codes(self.text_embed.codec_embed.weight)

    def modulation(self, times: Tensor) -> Tensor:
        """Return shifts, scales and gates of every adaptive norm at each of `times` [E] fp32; they do not depend on the
        input.

        Returns:
            [E, 6 L + 2, H] fp32: of each layer attention shift, scale, gate, feed-forward shift, scale, gate; then
            the final scale and shift.
        """
        embedded = F.silu(self.time_embed(times))
        layers = [cast(Layer, layer).attn_norm(embedded) for layer in self.transformer_blocks]
        return torch.cat([*layers, self.norm_out(embedded)], dim=1)

    def rotary(self, positions: Tensor) -> Rotary:
        """Return the rotary angles [T, 1, head_dim / 2] of frame `positions` [T] within their windows."""
        angles = (positions[:, None].float() * self.rotary_frequencies)[:, None]
        return Rotary(angles.cos(), angles.sin())

    def past_pool(self, pages: int, dtype: torch.dtype) -> WindowCachePool:
        """Allocate `pages` pages of keys and values in `dtype` on the network's device."""
        device = self.rotary_frequencies.device
        rotary = self.rotary(torch.arange(-self.config.block_size, 0, device=device))
        return WindowCachePool(self.config, rotary, pages, dtype=dtype, device=device)

    def velocity_for(self, condition: Tensor, modulation: Tensor, layout: BlockLayout, past: WindowKVCache) -> Velocity:
        """Return the velocity of one batch as a function of the evaluation's number and the state; see `forward`.

        Args:
            condition: [R, H].
            modulation: [E, 6 L + 2, H] of every evaluation time.
            layout: where the windows lie in the R rows.
            past: what they find and leave.
        """
        rotary = self.rotary(layout.positions)
        return lambda number, state: self(number, state, condition, modulation, rotary=rotary, layout=layout, past=past)

    def forward(
        self,
        number: int,
        state: Tensor,
        condition: Tensor,
        modulation: Tensor,
        *,
        rotary: Rotary,
        layout: BlockLayout,
        past: WindowKVCache,
    ) -> Tensor:
        """Evaluate the velocity once.

        Args:
            number: of the evaluation, from 0.
            state: [R, M] fp32, the ODE's state.
            condition: [R, H], sum of the code and voice parts of the input projection.
            modulation: [E, 6 L + 2, H], adaptive norms of every evaluation.
            rotary: angles of the layout's positions.
            layout: where the windows lie in the R rows.
            past: what they find and leave; written to.

        Returns:
            [R, M] fp32.
        """
        hidden = self.input_embed.mel(state) + condition
        norms = torch.split(modulation[number, :-FINAL_PARTS], LAYER_PARTS)
        for place, (layer, parts) in enumerate(zip(self.transformer_blocks, norms, strict=True)):
            hidden = layer(hidden, parts, rotary, layout, past.at(number, place))
        scale, shift = modulation[number, -FINAL_PARTS:].unbind(0)
        velocity: Tensor = self.proj_out(modulate(hidden, shift, scale))
        return velocity


class CodeEmbedding(nn.Module):
    """The embedding of the codec's codes, with one row more than the codec has."""

    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        self.codec_embed = nn.Embedding(config.num_embeds + 1, config.emb_dim)


class AdaptiveNorm(nn.Module):
    """Shifts, scales and gates of a norm from the time embedding; `modulate` applies them."""

    def __init__(self, hidden_size: int, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.linear = nn.Linear(hidden_size, hidden_size * parts)

    def forward(self, embedded: Tensor) -> Tensor:
        """[E, H] to [E, parts, H]."""
        return torch.reshape(self.linear(embedded), (len(embedded), self.parts, -1))


class FeedForward(nn.Module):
    """Two linear layers around a GELU; places 0 and 3 of `ff`, as the checkpoint numbers them."""

    def __init__(self, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        enter, leave = nn.Linear(hidden_size, inner_size), nn.Linear(inner_size, hidden_size)
        self.ff = nn.Sequential(OrderedDict({"0": enter, "gelu": nn.GELU("tanh"), "3": leave}))

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] to the same."""
        output: Tensor = self.ff(hidden)
        return output


class InputEmbedding(nn.Module):
    """The input projection of (state, speaker vector, code, speaker embedding), by its four parts.

    The checkpoint has one matrix; split into parts, only the state's part is computed at every evaluation.
    """

    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        self.widths = (config.mel_dim, config.ecapa.dim, config.emb_dim, config.speaker_dim)
        self.proj = nn.Linear(sum(self.widths), config.hidden_size)
        self.spk_encoder = Ecapa(config.ecapa, config.mel_dim)

    def mel(self, state: Tensor) -> Tensor:
        """[..., M] to [..., H]."""
        return F.linear(state, self._part(0))

    def codes(self, embedded: Tensor) -> Tensor:
        """[..., emb_dim] to [..., H]."""
        return F.linear(embedded, self._part(2))

    def voice(self, speaker: Tensor, reference_mel: Tensor) -> Tensor:
        """[speaker_dim] and [T, M] to [H]."""
        vector: Tensor = self.spk_encoder(reference_mel[None])[0]
        return F.linear(vector, self._part(1)) + F.linear(speaker, self._part(3), self.proj.bias)

    def _part(self, number: int) -> Tensor:
        start = sum(self.widths[:number])
        return self.proj.weight[:, start : start + self.widths[number]]


class TimeEmbedding(nn.Module):
    """Sinusoids of the time, then two linear layers (HF: `DiTTimestepEmbedding`)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        # Places 0 and 2, as the checkpoint numbers them.
        self.time_mlp = nn.Sequential(
            nn.Linear(TIME_FREQUENCIES, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )

    def forward(self, times: Tensor) -> Tensor:
        """[E] to [E, H]."""
        half = TIME_FREQUENCIES // 2
        exponents = torch.arange(half, device=times.device, dtype=torch.float32) / (half - 1)
        angles = TIME_SCALE * times[:, None] * torch.exp(-math.log(10000.0) * exponents)
        embedded: Tensor = self.time_mlp(torch.cat([angles.sin(), angles.cos()], dim=-1))
        return embedded


class Layer(nn.Module):
    """Attention and feed-forward, each after an adaptive norm and followed by a gate (HF: `DiTDecoderLayer`)."""

    def __init__(self, config: DitConfig, attention: Attention, reach: tuple[int, int]) -> None:
        super().__init__()
        self.attn_norm = AdaptiveNorm(config.hidden_size, LAYER_PARTS)
        self.attn = SelfAttention(config, attention, reach)
        self.ff = FeedForward(config.hidden_size, config.hidden_size * config.ff_mult)

    def forward(
        self, hidden: Tensor, parts: Tensor, rotary: Rotary, layout: BlockLayout, past: LayerKVCache | None
    ) -> Tensor:
        """[R, H] to the same; `parts` [6, H] are this layer's shifts, scales and gates."""
        attn_shift, attn_scale, attn_gate, ff_shift, ff_scale, ff_gate = parts.unbind(0)
        hidden = hidden + attn_gate * self.attn(modulate(hidden, attn_shift, attn_scale), rotary, layout, past)
        output: Tensor = hidden + ff_gate * self.ff(modulate(hidden, ff_shift, ff_scale))
        return output


class SelfAttention(nn.Module):
    """Multi-head attention over the blocks that this layer can see (HF: `DiTAttention`)."""

    def __init__(self, config: DitConfig, attention: Attention, reach: tuple[int, int]) -> None:
        super().__init__()
        inner = config.num_heads * config.head_dim
        self.heads = config.num_heads
        self.attention, self.reach = attention, reach
        self.to_q = nn.Linear(config.hidden_size, inner)
        self.to_k = nn.Linear(config.hidden_size, inner)
        self.to_v = nn.Linear(config.hidden_size, inner)
        self.to_out = nn.Sequential(nn.Linear(inner, config.hidden_size))

    def forward(self, hidden: Tensor, rotary: Rotary, layout: BlockLayout, past: LayerKVCache | None) -> Tensor:
        """[R, H] to the same."""
        by_head = (len(hidden), self.heads, -1)
        query, key, value = (part(hidden).view(by_head) for part in (self.to_q, self.to_k, self.to_v))
        before = None if past is None else self._exchange(key, value, layout, past)
        rotate_(query, rotary)
        rotate_(key, rotary)
        mixed = self.attention(query, key, value, layout, self.reach, before=before)
        output: Tensor = self.to_out(mixed.flatten(1))
        return output

    def _exchange(self, key: Tensor, value: Tensor, layout: BlockLayout, past: LayerKVCache) -> Before:
        """Read the keys and values of earlier windows, then leave `key`, not yet rotated, and `value` to the next
        ones.
        """
        earlier_key, earlier_value, there = past.find(self.heads)
        past.write(key[layout.by_block], value[layout.by_block])
        rotate_(earlier_key, past.rotary)
        return Before(earlier_key, earlier_value, there)


def modulate(hidden: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Apply an adaptive norm: layer norm without own weights, then scale and shift; [..., H], [H], [H]."""
    return F.layer_norm(hidden, hidden.shape[-1:], eps=NORM_EPS) * (1 + scale) + shift
