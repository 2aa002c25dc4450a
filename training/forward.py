# SPDX-License-Identifier: Apache-2.0
"""The thinker's forward pass over batches of equal shape, on the parameters of HF's module.

HF's own pass splits every sound and picture in Python and waits for the device. This one does neither, so a training
step can be recorded as one CUDA graph. `tests/unit/test_training_forward.py` holds both equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

WINDOW_FRAMES = 200
"""Mel frames that the audio encoder sees at once: two seconds."""


def audio_tokens(frames: int) -> int:
    """Tokens of a sound of `frames` mel frames, as HF counts them."""
    return ((frames - 1) // 2 - 1) // 2 + 1


@dataclass(frozen=True)
class Heard:
    """Return the audio encoder's output for sounds; positions after a sound's end hold nothing of use."""

    inner: Tensor
    """[B, F / 4, audio width]: before the last projection."""
    rows: Tensor
    """[B, F / 4, hidden]: what replaces the sounds' tokens."""


def hear(tower: Any, mel: Tensor, frames: Tensor) -> Heard:
    """The audio encoder (`thinker.audio_tower`).

    Args:
        tower: HF's module.
        mel: [B, 128, F], F a multiple of 200.
        frames: [B]: frames that each sound has.
    """
    batch, bands, length = mel.shape
    windows = length // WINDOW_FRAMES
    split = mel.view(batch, bands, windows, WINDOW_FRAMES).transpose(1, 2).reshape(-1, bands, WINDOW_FRAMES)
    begins = torch.arange(windows, device=mel.device) * WINDOW_FRAMES
    own = (frames.unsqueeze(1) - begins).clamp(0, WINDOW_FRAMES).view(-1, 1, 1)
    exists = torch.arange(WINDOW_FRAMES, device=mel.device) < own
    x = F.gelu(tower.conv1(split * exists)) * exists
    x = F.gelu(tower.conv2(x)).transpose(1, 2)
    x = x + tower.positional_embedding.positional_embedding[: x.shape[1]]
    # A window without a frame keeps one key: the softmax of none is not a number.
    keys = torch.arange(x.shape[1], device=mel.device) < ((own + 1) // 2).clamp(min=1)
    for layer in tower.layers:
        x = _audio_layer(layer, x, keys.unsqueeze(1))
    pooled = tower.ln_post(x.view(x.shape[0], -1, 2, x.shape[2]).mean(2)).view(batch, length // 4, -1)
    return Heard(pooled, tower.proj(pooled))


def _audio_layer(layer: Any, x: Tensor, keys: Tensor) -> Tensor:
    attention = layer.self_attn
    normed = layer.self_attn_layer_norm(x)
    q, k, v = (
        _heads(projection(normed), attention.num_heads)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    x = x + attention.out_proj(_joined(F.scaled_dot_product_attention(q, k, v, attn_mask=keys)))
    normed = layer.final_layer_norm(x)
    return x + layer.fc2(F.gelu(layer.fc1(normed)))  # type: ignore[no-any-return]


def see(tower: Any, patches: Tensor, height: int, width: int) -> Tensor:
    """The vision encoder (`thinker.visual`), all of whose layers see a whole frame.

    Args:
        tower: HF's module.
        patches: [B, frames / 2, height * width, 1176], as `render.patches` has them.
        height: patches down.
        width: patches across.

    Returns:
        [B, frames / 2, height * width / 4, hidden]: what replaces the pictures' tokens.
    """
    batch, pairs, count, values = patches.shape
    weight = tower.patch_embed.proj.weight.view(-1, values)
    x = F.linear(patches.reshape(batch * pairs, count, values), weight)
    cos, sin = tower.rotary_pos_emb(x, patch_places(height, width, x.device))
    for block in tower.blocks:
        x = _vision_block(block, x, cos.unsqueeze(0), sin.unsqueeze(0))
    merger = tower.merger
    merged = _normed(x, merger.ln_q).reshape(batch, pairs, count // 4, -1)
    return merger.mlp(merged)  # type: ignore[no-any-return]


def patch_places(height: int, width: int, device: torch.device) -> Tensor:
    """Row and column of each patch [height * width, 2], those of one token side by side."""
    rows = torch.arange(height, device=device).view(-1, 1).expand(-1, width)
    columns = torch.arange(width, device=device).expand(height, -1)
    grid = torch.stack([rows, columns], -1).view(height // 2, 2, width // 2, 2, 2)
    return grid.transpose(1, 2).reshape(-1, 2)


def _vision_block(block: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    attention = block.attn
    normed = _normed(x, block.norm1)
    q, k, v = (_heads(part(normed), attention.num_heads) for part in (attention.q, attention.k, attention.v))
    q, k = _turned(q, cos, sin).to(v.dtype), _turned(k, cos, sin).to(v.dtype)
    x = x + attention.proj(_joined(F.scaled_dot_product_attention(q, k, v)))
    return x + _gated(block.mlp, _normed(x, block.norm2))


def think(model: Any, embeds: Tensor, positions: Tensor) -> Tensor:
    """The text model (`thinker.model`) over right-padded rows.

    Args:
        model: HF's module.
        embeds: [B, L, hidden].
        positions: [3, B, L]: time, height and width.

    Returns:
        [B, L, hidden]: the last hidden states, normed.
    """
    cos, sin = model.rotary_emb(embeds, positions)
    x = embeds
    for layer in model.layers:
        attention = layer.self_attn
        normed = _normed(x, layer.input_layernorm)
        q = _heads(attention.q_proj(normed), attention.num_heads)
        k = _heads(attention.k_proj(normed), attention.num_key_value_heads)
        v = _heads(attention.v_proj(normed), attention.num_key_value_heads)
        q, k = _turned(q, cos, sin).to(v.dtype), _turned(k, cos, sin).to(v.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + attention.o_proj(_joined(mixed))
        x = x + _gated(layer.mlp, _normed(x, layer.post_attention_layernorm))
    return _normed(x, model.norm)


def _normed(x: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], norm.weight, norm.variance_epsilon)


def _gated(mlp: Any, x: Tensor) -> Tensor:
    return mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))  # type: ignore[no-any-return]


def _heads(x: Tensor, count: int) -> Tensor:
    """[B, L, width] to [B, heads, L, width / heads]."""
    return x.view(*x.shape[:2], count, -1).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, heads, L, D] by [B or 1, L, D]."""
    first, second = x.float().chunk(2, -1)
    return x.float() * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)


def text_positions(embeds: Tensor) -> Tensor:
    """Positions [3, B, L] of rows [B, L, hidden] of text and sounds."""
    return torch.arange(embeds.shape[1], device=embeds.device).expand(3, *embeds.shape[:2])


def vision_positions(begin: Tensor, length: int, grid: tuple[int, int, int], seconds: Tensor) -> Tensor:
    """Positions [3, B, L] of rows with one picture or video each, as HF's `get_rope_index` has them.

    Args:
        begin: [B]: place of the medium's first token.
        length: L.
        grid: pairs of frames, and tokens down and across.
        seconds: [B]: between two pairs of frames.
    """
    pairs, height, width = grid
    count = pairs * height * width
    place = torch.arange(length, device=begin.device).unsqueeze(0)
    inside = place - begin.unsqueeze(1)
    pair, cell = inside.div(height * width, rounding_mode="floor"), inside.remainder(height * width)
    pace = seconds.view(-1, 1)
    axes = torch.stack([(pair * pace * 25).long(), cell.div(width, rounding_mode="floor"), cell.remainder(width)])
    last = ((pairs - 1) * pace * 25).long().clamp(min=max(height, width) - 1)
    after = inside - count + last + 1
    among = torch.where(inside >= count, after, axes)
    return begin.unsqueeze(1) + torch.where(inside < 0, inside, among)
