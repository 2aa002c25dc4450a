# SPDX-License-Identifier: Apache-2.0
"""Columns of the table that tells a talker step of its tokens; the step and its fused kernels read it."""

from __future__ import annotations

from enum import IntEnum


class Column(IntEnum):
    """Inputs of a step for each token; one int64 each, so that all of them are one copy to the device."""

    ROW = 0
    """Its row in the pool."""
    SLOT = 1
    """The slot of its sequence."""
    PLACE = 2
    """Its position in its sequence."""
    UNIFORM = 3
    """Bits of the float64 that draws the next id."""
    FOLLOWS = 4
    """1 where it is what the last decode step drew in the same row; the step then lays it out by the next two."""
    AXIS = 5
    """Its position on the axes of M-RoPE, which are equal after the prompt."""
    CACHE = 6
    """Its slot in the key-value cache, below 0 for none."""
    LENGTH = 7
    """Positions that attention reads for it, its own with them; 0 = no sequence. Not for the step itself, in which
    attention may read the lengths before anything else is through, but for the kernel that brings all of this."""
