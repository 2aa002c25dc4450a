# SPDX-License-Identifier: Apache-2.0
"""M-RoPE positions after a prompt. Independent of sessions and engines."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def extend_positions(positions: Tensor, count: int) -> Tensor:
    """Extend M-RoPE positions [3, P] by `count` text tokens to [3, P + count].

    Text after any prompt continues from the largest position on all three axes, as in HF's `get_rope_index`. Uses
    numpy: every torch call competes with a busy loop for the interpreter lock. Uses array methods: numpy's functions
    written in Python take several times as long, above all after a pause.
    """
    known = positions.numpy()
    length = known.shape[1]
    after = int(known.max()) + 1 if length else 0
    extended = np.empty((3, length + count), known.dtype)
    extended[:, :length] = known
    extended[:, length:] = np.arange(after, after + count)
    return torch.from_numpy(extended)
