# SPDX-License-Identifier: Apache-2.0
"""M-RoPE positions behind a prompt. It knows no session and no engine."""

from __future__ import annotations

import torch
from torch import Tensor


def extend_positions(positions: Tensor, count: int) -> Tensor:
    """M-RoPE positions [3, P] continued by `count` text tokens: [3, P + count].

    Text after any prompt continues from the largest position on all three axes, as in HF's `get_rope_index`.
    """
    after = int(positions.max()) + 1 if positions.numel() else 0
    return torch.cat([positions, torch.arange(after, after + count).expand(3, count)], dim=1)
