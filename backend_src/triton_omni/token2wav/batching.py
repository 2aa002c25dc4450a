# SPDX-License-Identifier: Apache-2.0
"""Layout of unequal windows of mel frames as one ragged batch: rows of one window after another, without padding.

Only attention sees blocks. A block is a number of rows that follow each other in a window, whose last block may be
short. Pure index arithmetic, independent of the networks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triton_omni.core.gpu import to_device, upload

LAYOUTS_KEPT = 128
"""Number of recent layouts that are cached; with angles each takes at most half a megabyte where batches are
recorded.
"""
REACHES = ((0, 0), (1, 0), (0, 1), (1, 1))
"""(look-back, look-ahead) in blocks that a layer of the DiT can have."""


@dataclass(frozen=True)
class Blocks:
    """The rows that belong to each of N blocks, and to the blocks beside it in the same window; int32 [N] each."""

    first: Tensor
    """Its first row."""
    before: Tensor
    """Number of rows of the block before, which end at `first`: a whole block, or 0 for a window's first one."""
    own: Tensor
    """Number of its rows."""
    after: Tensor
    """Number of rows of the block after, which follow its own; 0 for a window's last one."""


@dataclass(frozen=True)
class Reach:
    """The keys that each block of queries sees with one (look-back, look-ahead): what the plain path needs."""

    rows: Tensor
    """int64 [N, K x block]: rows of the K = look_back + 1 + look_ahead blocks, in time order. Places that hold no frame
    repeat the block's own first row.
    """
    mask: Tensor | None
    """bool [N, 1, 1, K x block]: places that hold a frame; None when all of them do."""


@dataclass(frozen=True)
class Dense:
    """Windows as rows of one length: what attention over whole windows needs."""

    rows: Tensor
    """int64 [W, T]: the row at each place of each window; places after its end repeat its last row."""
    valid: Tensor
    """bool [W, T]: places that hold a frame."""
    places: Tensor
    """int64 [R]: the place of each row in the flattened [W x T] view."""
    first: Tensor
    """int64 [W]: the first block of each window."""


@dataclass(frozen=True)
class BlockLayout:
    """Positions of W windows in a batch of R rows, and their N blocks."""

    lengths: tuple[int, ...]
    """Mel frames of each window, R together."""
    block_size: int
    starts: tuple[int, ...]
    """The first block of each window."""
    positions: Tensor
    """int64 [R]: frame number within the window."""
    windows: Tensor
    """int64 [R]: the window of each row."""
    blocks: Blocks
    table: NDArray[np.int64]
    """[4, N], on the host: what `blocks` holds."""

    @property
    def num_blocks(self) -> int:
        """N."""
        return self.table.shape[1]

    @functools.cached_property
    def reaches(self) -> dict[tuple[int, int], Reach]:
        """Reaches by (look-back, look-ahead) in blocks; only for the plain path, so made at first use."""
        return {reach: self._reach(*reach) for reach in REACHES}

    @property
    def by_block(self) -> Tensor:
        """int64 [N, block]: rows of each block; places that hold no frame repeat its first row. For the plain path."""
        return self.reaches[0, 0].rows

    @functools.cached_property
    def places(self) -> Tensor:
        """int64 [R]: the place of each row in the flattened [N x block] view; also for the plain path only."""
        valid = np.arange(self.block_size) < self.table[2][:, None]
        return to_device(torch.from_numpy(np.flatnonzero(valid)), self.positions.device)

    @functools.cached_property
    def dense(self) -> Dense:
        """Windows as rows; also for the plain path only."""
        lengths = torch.tensor(self.lengths)[:, None]
        place = torch.arange(max(self.lengths))
        valid = place < lengths
        rows = lengths.cumsum(0) - lengths + torch.minimum(place, lengths - 1)
        places = valid.flatten().nonzero()[:, 0]
        parts = (rows, valid, places, torch.tensor(self.starts))
        return Dense(*(to_device(part, self.positions.device) for part in parts))

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the windows [T, F] of rows [R, F]."""
        return torch.split(rows, list(self.lengths))

    def _reach(self, look_back: int, look_ahead: int) -> Reach:
        first, before, own, after = torch.from_numpy(self.table)[:, :, None]
        place, size, device = torch.arange(self.block_size), self.block_size, self.positions.device
        sides = [(first - size, before)] * look_back + [(first, own)] + [(first + own, after)] * look_ahead
        mask = torch.cat([place < count for _, count in sides], dim=1)
        # A place without a frame reads the window's own row, which keeps non-finite values of other windows out: a
        # masked key still multiplies its value by zero, and zero times NaN is NaN.
        rows = torch.where(mask, torch.cat([start + place for start, _ in sides], dim=1), first)
        return Reach(
            rows=to_device(rows, device),
            mask=None if bool(mask.all()) else to_device(mask[:, None, None, :], device),
        )


@functools.lru_cache(maxsize=LAYOUTS_KEPT)
def block_layout(lengths: tuple[int, ...], block_size: int, device: torch.device) -> BlockLayout:
    """Return the layout of windows of `lengths` mel frames (each at least 1) in blocks of `block_size`.

    Layouts are cached: the windows of a plan have few lengths. Uses numpy and one copy to the device: every torch call
    releases the interpreter lock, for which a busy stage's threads then compete.
    """
    counts = np.array([-(-length // block_size) for length in lengths])
    starts, ends = counts.cumsum() - counts, np.cumsum(lengths)
    window = np.repeat(np.arange(len(lengths)), counts)
    place = np.arange(len(window)) - starts[window]
    first = (ends - lengths)[window] + place * block_size
    left = ends[window] - first
    own = np.minimum(left, block_size)
    table = np.stack([first, np.minimum(place, 1) * block_size, own, np.minimum(left - own, block_size)])
    rows = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(len(rows)) - (ends - lengths)[rows]
    there = upload([positions, rows, *table], device)
    return BlockLayout(
        lengths=lengths,
        block_size=block_size,
        starts=tuple(starts.tolist()),
        positions=there[0],
        windows=there[1],
        blocks=Blocks(*(part.int() for part in there[2:])),
        table=table,
    )
