# SPDX-License-Identifier: Apache-2.0
"""Attention of the DiT over blocks of mel frames: the plain masked form and the block-local fast one.

Both have one signature, take the same ragged batch and agree within fp32 rounding; a setting chooses. Queries and keys
have a rotary embedding (HF: `apply_rotary_pos_emb` of token2wav).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from triton_omni.token2wav.batching import BlockLayout

AttentionKind = Literal["block", "plain"]


@dataclass(frozen=True)
class Before:
    """Keys and values before each of the N blocks that are in no block of the batch: an earlier window left them."""

    key: Tensor
    """[N, block, heads, head_dim], rotated; zero where there is none."""
    value: Tensor
    """The same."""
    there: Tensor
    """bool [N]: True for first blocks of windows that have an earlier window."""


class Attention(Protocol):
    """The signature of both forms."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: BlockLayout,
        reach: tuple[int, int],
        *,
        before: Before | None = None,
    ) -> Tensor:
        """Return the mixed values [R, heads, head_dim]; see `block_attention`."""


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: BlockLayout,
    reach: tuple[int, int],
    *,
    before: Before | None = None,
) -> Tensor:
    """Attend from every frame to every frame of its window under a mask (HF: `_create_block_diff`).

    Time and memory grow with the square of the longest window; the reference for `block_attention`.
    """
    look_back, look_ahead = reach
    rows, valid = layout.dense.rows, layout.dense.valid
    block = torch.arange(valid.shape[1], device=query.device) // layout.block_size
    distance = block[None, :] - block[:, None]
    within = (distance >= -look_back) & (distance <= look_ahead)
    # Places after a window's end attend to themselves only, so that no row of the softmax is empty.
    mask = (within & valid[:, None, :]) | torch.eye(len(block), dtype=torch.bool, device=query.device)
    query, key, value = (tensor[rows].transpose(1, 2) for tensor in (query, key, value))
    if before is not None:
        first = layout.dense.first
        key = torch.cat([before.key[first].transpose(1, 2), key], dim=2)
        value = torch.cat([before.value[first].transpose(1, 2), value], dim=2)
        seen = before.there[first][:, None, None] & (block == 0)[:, None]
        mask = torch.cat([seen.expand(-1, -1, layout.block_size), mask], dim=2)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None])
    return mixed.transpose(1, 2).flatten(0, 1)[layout.dense.places]


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: BlockLayout,
    reach: tuple[int, int],
    *,
    before: Before | None = None,
) -> Tensor:
    """Attend from every block of frames to the blocks that it can see; linear in the number of blocks.

    Args:
        query, key, value: [R, heads, head_dim].
        layout: the blocks of the R rows.
        reach: (look-back, look-ahead) in blocks, one of `batching.REACHES`.
        before: what a layer with look-back sees of earlier windows; None for nothing.
    """
    keys, size = layout.reaches[reach], layout.block_size
    query, key, value, mask = query[layout.by_block], key[keys.rows], value[keys.rows], keys.mask
    if before is not None:
        there = before.there[:, None, None, None]
        key[:, :size] = torch.where(there, before.key, key[:, :size])
        value[:, :size] = torch.where(there, before.value, value[:, :size])
        # The mask is not None: the first block of a window has no block before it in the batch.
        mask = cast(Tensor, mask).clone()
        mask[..., :size] |= there
    mixed = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask
    )
    return mixed.transpose(1, 2).flatten(0, 1)[layout.places]


ATTENTION: dict[AttentionKind, Attention] = {"block": block_attention, "plain": plain_attention}


# --- rotary embedding -------------------------------------------------------------------------------------------------


ROTARY_HEADS = 1
"""Number of rotated heads, the first ones: a quirk of the training that the weights depend on."""


@dataclass(frozen=True)
class Rotary:
    """Cosine and sine of the rotary angles, [..., 1, head_dim / 2] each."""

    cos: Tensor
    sin: Tensor


def rotate_(projected: Tensor, rotary: Rotary) -> None:
    """Rotate the first head of `projected` [..., heads, head_dim] in place, in interleaved pairs."""
    heads = projected[..., :ROTARY_HEADS, :]
    even, odd = heads[..., 0::2], heads[..., 1::2]
    rotated = torch.stack([even * rotary.cos - odd * rotary.sin, odd * rotary.cos + even * rotary.sin], dim=-1)
    heads.copy_(rotated.flatten(-2))
