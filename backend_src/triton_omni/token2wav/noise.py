# SPDX-License-Identifier: Apache-2.0
"""Standard normal noise as a function of (seed, mel frame, mel channel), without state or order of drawing.

Philox 4x32-10 (Salmon et al., SC 2011) on integer tensors gives the same bits on every device and in every batch.
Box-Muller runs in fp64 and is rounded to fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from triton_omni.core.gpu import to_device

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF
_WORDS = 4

MAX_SEED = 2**64 - 1


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Compute Philox 4x32-10: four counter words and two key words to four random words.

    Every word is an int64 tensor with a value in [0, 2^32); shapes broadcast.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def standard_normal(spans: Sequence[tuple[int, int, int]], channels: int, device: torch.device) -> Tensor:
    """Return the noise of the mel frames of several windows, in as many launches as for one.

    Args:
        spans: (seed in [0, 2^64), absolute number of the first frame, one beyond the last) of each window.
        channels: mel channels.
        device: where to make it.

    Returns:
        [sum of frames, channels] fp32, the windows concatenated.
    """
    frames, key_low, key_high = to_device(counters(spans), device)[:, :, None]
    groups = torch.arange(-(-channels // _WORDS), device=device)[None, :]
    zero = torch.zeros_like(frames)
    words = philox((frames, groups, zero, zero), (key_low, key_high))
    normals = torch.stack([*_box_muller(words[0], words[1]), *_box_muller(words[2], words[3])], dim=-1)
    return normals.flatten(1)[:, :channels].float()


def counters(spans: Sequence[tuple[int, int, int]]) -> Tensor:
    """Return the inputs of each frame's noise for `standard_normal`'s `spans`: one copy to the device.

    Returns:
        int64 [3, sum of frames] on the host: frame, low and high half of the seed.
    """
    rows = [np.arange(start, end) for _, start, end in spans]
    words = [
        np.full((2, len(row)), [[seed & _MASK], [seed >> 32]]) for row, (seed, _, _) in zip(rows, spans, strict=True)
    ]
    return torch.from_numpy(np.vstack([np.concatenate(rows), np.concatenate(words, axis=1)]))


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Return the high and low word of a 32 x 32 bit product, by halves: int64 cannot hold the whole product."""
    low_part = word * (multiplier & 0xFFFF)
    high_part = word * (multiplier >> 16)
    high = (high_part + (low_part >> 16)) >> 16
    low = (((high_part & 0xFFFF) << 16) + low_part) & _MASK
    return high, low


def _box_muller(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    # Half a step above zero: the logarithm never sees 0.
    radius = torch.sqrt(-2.0 * torch.log((first.double() + 0.5) / 2**32))
    angle = 2.0 * math.pi * (second.double() / 2**32)
    return radius * torch.cos(angle), radius * torch.sin(angle)
