# SPDX-License-Identifier: Apache-2.0
"""M-RoPE positions behind a prompt. It knows no session and no engine."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def extend_positions(positions: Tensor, count: int) -> Tensor:
    """M-RoPE positions [3, P] continued by `count` text tokens: [3, P + count].

    Text after any prompt continues from the largest position on all three axes, as in HF's `get_rope_index`. By numpy:
    of a crowd each is let in beside a busy loop, for whose lock every call of torch would stand in line. And by its
    arrays' own operations: its functions in Python take several times as long, above all after a rest.
    """
    known = positions.numpy()
    length = known.shape[1]
    after = int(known.max()) + 1 if length else 0
    extended = np.empty((3, length + count), known.dtype)
    extended[:, :length] = known
    extended[:, length:] = np.arange(after, after + count)
    return torch.from_numpy(extended)
