# SPDX-License-Identifier: Apache-2.0
"""Sizes of tiles for kernels in the Triton language."""

from __future__ import annotations

_SMALLEST_TILE = 16
"""Tensor cores multiply no smaller tiles."""


def padded_rows(count: int) -> int:
    """The smallest tile that holds so many rows."""
    return max(_SMALLEST_TILE, 1 << (count - 1).bit_length())
