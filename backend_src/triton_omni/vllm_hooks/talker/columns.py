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
    """1 if it is the last decode step's draw in the same row; the step then lays it out by the next two columns."""
    AXIS = 5
    """Its position on the axes of M-RoPE, which are equal after the prompt."""
    CACHE = 6
    """Its slot in the key-value cache, below 0 for none."""
    LENGTH = 7
    """Positions that attention reads for it, including its own; 0 = no sequence. The kernel that copies this table to
    the device writes the lengths: attention may read them before the step's own kernels have run."""
