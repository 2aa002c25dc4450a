# SPDX-License-Identifier: Apache-2.0
"""Layout of unequal windows of mel frames as one ragged batch of whole attention blocks.

Windows follow each other in blocks, so that only a window's last block can hold padding. Pure index arithmetic,
independent of the networks.
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
class Reach:
    """The keys that each block of queries sees with one (look-back, look-ahead)."""

    blocks: Tensor
    """int64 [N x K]: the K = look_back + 1 + look_ahead blocks of keys for each block, in time order."""
    mask: Tensor | None
    """bool [N, 1, 1, K x block]: keys that are frames of the same window; None when all of them are."""


@dataclass(frozen=True)
class Neighbours:
    """`Reach` in the form of the fused kernel: numbers of the blocks beside each block."""

    previous: Tensor
    """int32 [N]: the block before in the same window, -1 for none."""
    following: Tensor
    """int32 [N]: the block after in the same window, -1 for none."""
    valid_frames: Tensor
    """int32 [N]: frames of the block that are not padding."""


@dataclass(frozen=True)
class Dense:
    """Windows as rows of one length: what attention over whole windows needs."""

    blocks: Tensor
    """int64 [W, B]: the block at place b of window w; places after a window's end repeat its last block."""
    places: Tensor
    """int64 [N]: the place of each block in the flattened [W x B] view."""
    valid: Tensor
    """bool [W, B x block]: places that hold a frame."""


@dataclass(frozen=True)
class BlockLayout:
    """Positions of W windows in a batch of N blocks, and the blocks that are neighbours in time."""

    lengths: tuple[int, ...]
    """Mel frames of each window."""
    block_size: int
    starts: tuple[int, ...]
    """The first block of each window."""
    positions: Tensor
    """int64 [N, block]: frame number within the window."""
    slots: Tensor
    """int64 [sum of lengths]: where each row lies in the flattened blocks."""
    windows: Tensor
    """int64 [sum of lengths]: the window of each row."""
    neighbours: Neighbours
    block_windows: NDArray[np.int64]
    """[N], on the host: the window of each block."""
    valid: NDArray[np.bool_]
    """[N, block], on the host: which frames are not padding"""
    block_neighbours: NDArray[np.int64]
    """[3, N], on the host: what `neighbours` holds."""

    @property
    def num_blocks(self) -> int:
        """N."""
        return self.positions.shape[0]

    @functools.cached_property
    def reaches(self) -> dict[tuple[int, int], Reach]:
        """Reaches by (look-back, look-ahead) in blocks; only for the plain path, so made at first use."""
        window, valid = torch.from_numpy(self.block_windows), torch.from_numpy(self.valid)
        return {reach: _reach(window, valid, *reach, self.positions.device) for reach in REACHES}

    @functools.cached_property
    def dense(self) -> Dense:
        """Windows as rows; also for the plain path only."""
        window, valid = torch.from_numpy(self.block_windows), torch.from_numpy(self.valid)
        device = self.positions.device
        first, counts = torch.tensor(self.starts), torch.bincount(window)
        place = torch.arange(int(counts.max())).expand(len(counts), -1)
        blocks = first[:, None] + torch.minimum(place, counts[:, None] - 1)
        inside = valid[blocks] & (place < counts[:, None])[..., None]
        places = window * place.shape[1] + torch.arange(len(window)) - first[window]
        return Dense(to_device(blocks, device), to_device(places, device), to_device(inside.flatten(1), device))

    @property
    def is_full(self) -> bool:
        """True if there is no padding."""
        return sum(self.lengths) == self.num_blocks * self.block_size

    def pack(self, rows: Tensor) -> Tensor:
        """Arrange rows [sum of lengths, F], the windows concatenated, into blocks [N, block, F]; padding is zero."""
        width = rows.shape[-1]
        if self.is_full:
            return rows.view(-1, self.block_size, width)
        blocks = rows.new_zeros(self.num_blocks * self.block_size, width)
        return blocks.index_copy_(0, self.slots, rows).view(-1, self.block_size, width)

    def unpack(self, blocks: Tensor) -> tuple[Tensor, ...]:
        """Extract the windows [T, F] from blocks [N, block, F]; the inverse of `pack`."""
        rows = blocks.reshape(-1, blocks.shape[-1])
        if not self.is_full:
            rows = rows.index_select(0, self.slots)
        return torch.split(rows, list(self.lengths))


@functools.lru_cache(maxsize=LAYOUTS_KEPT)
def block_layout(lengths: tuple[int, ...], block_size: int, device: torch.device) -> BlockLayout:
    """Return the layout of windows of `lengths` mel frames (each at least 1) in blocks of `block_size`.

    Layouts are cached: the windows of a plan have few lengths. Uses numpy and one copy to the device: every torch call
    releases the interpreter lock, for which a busy stage's threads then compete.
    """
    counts = np.array([-(-length // block_size) for length in lengths])
    first = counts.cumsum() - counts
    window = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(window))
    place = number - first[window]
    positions = place[:, None] * block_size + np.arange(block_size)
    valid = positions < np.array(lengths)[window][:, None]
    previous = np.where(place > 0, number - 1, -1)
    following = np.where(place < counts[window] - 1, number + 1, -1)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    neighbours = np.stack([previous, following, valid.sum(1)])
    there = upload([positions.ravel(), valid.ravel().nonzero()[0], rows, *neighbours], device)
    return BlockLayout(
        lengths=lengths,
        block_size=block_size,
        starts=tuple(first.tolist()),
        positions=there[0].view(-1, block_size),
        slots=there[1],
        windows=there[2],
        neighbours=Neighbours(*(part.int() for part in there[3:])),
        block_windows=window,
        valid=valid,
        block_neighbours=neighbours,
    )


def _reach(window: Tensor, valid: Tensor, look_back: int, look_ahead: int, device: torch.device) -> Reach:
    """Return the neighbours of each block; a neighbour beyond the window's ends is the block itself, masked out."""
    count = window.shape[0]
    own = torch.arange(count)[:, None]
    wanted = own + torch.arange(-look_back, look_ahead + 1)
    inside = (wanted >= 0) & (wanted < count)
    blocks = torch.where(inside, wanted, own)
    inside &= window[blocks] == window[:, None]
    # Reading the window's own block also keeps non-finite values of other windows out: a masked key still multiplies
    # its value by zero, and zero times NaN is NaN.
    blocks = torch.where(inside, blocks, own)
    mask = (valid[blocks] & inside[..., None]).flatten(1)
    return Reach(
        blocks=to_device(blocks.flatten(), device),
        mask=None if bool(mask.all()) else to_device(mask[:, None, None, :], device),
    )
