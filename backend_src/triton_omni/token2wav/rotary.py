# SPDX-License-Identifier: Apache-2.0
"""The rotary embedding of the DiT's queries and keys (HF: `apply_rotary_pos_emb` of token2wav)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROTARY_HEADS = 1
"""Number of rotated heads, the first ones: a quirk of the training that the weights depend on."""


@dataclass(frozen=True)
class Rotary:
    """Cosine and sine of the rotary angles, [N, block, 1, head_dim / 2] each."""

    cos: Tensor
    sin: Tensor


def rotate_(projected: Tensor, rotary: Rotary) -> None:
    """Rotate the first head of `projected` [N, block, heads, head_dim] in place, in interleaved pairs."""
    heads = projected[:, :, :ROTARY_HEADS]
    even, odd = heads[..., 0::2], heads[..., 1::2]
    rotated = torch.stack([even * rotary.cos - odd * rotary.sin, odd * rotary.cos + even * rotary.sin], dim=-1)
    heads.copy_(rotated.flatten(-2))
