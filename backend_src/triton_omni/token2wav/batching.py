# SPDX-License-Identifier: Apache-2.0
"""Unequal windows of mel frames as one ragged batch of whole attention blocks, and back.

Windows are laid one after another in blocks, so that only a window's last block can hold padding.
Pure index arithmetic; knows nothing of the networks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triton_omni.token2wav.transfer import to_device

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
    """The same in the form of the fused kernel: numbers of the blocks beside each."""

    previous: Tensor
    """int32 [N]: the block before in the same window, -1 for none."""
    following: Tensor
    """int32 [N]: the block behind in the same window, -1 for none."""
    valid_frames: Tensor
    """int32 [N]: how many of the block's frames are no padding."""


@dataclass(frozen=True)
class BlockLayout:
    """Where W windows lie in a batch of N blocks, and which blocks are neighbours in time."""

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
    reaches: dict[tuple[int, int], Reach]
    dense_blocks: Tensor
    """int64 [W, B]: the block at place b of window w; places behind a window's end repeat its last block."""
    dense_places: Tensor
    """int64 [N]: the place of each block in the flattened [W x B] view."""
    dense_valid: Tensor
    """bool [W, B x block]: places that hold a frame."""

    @property
    def num_blocks(self) -> int:
        """N."""
        return self.positions.shape[0]

    def pack(self, rows: Tensor) -> Tensor:
        """Lay rows [sum of lengths, F], one window behind another, into blocks [N, block, F]; padding is zero."""
        width = rows.shape[-1]
        if len(rows) == self.num_blocks * self.block_size:
            return rows.view(-1, self.block_size, width)
        blocks = rows.new_zeros(self.num_blocks * self.block_size, width)
        return blocks.index_copy_(0, self.slots, rows).view(-1, self.block_size, width)

    def unpack(self, blocks: Tensor) -> tuple[Tensor, ...]:
        """Take the windows [T, F] out of blocks [N, block, F]; the inverse of `pack`."""
        rows = blocks.reshape(-1, blocks.shape[-1])
        if len(rows) != sum(self.lengths):
            rows = rows.index_select(0, self.slots)
        return torch.split(rows, list(self.lengths))


@functools.lru_cache(maxsize=128)
def block_layout(lengths: tuple[int, ...], block_size: int, device: torch.device) -> BlockLayout:
    """Lay out windows of `lengths` mel frames (each at least 1) in blocks of `block_size`.

    Layouts are kept: the windows of a plan have few lengths, and to make one takes a dozen copies to the device.
    """
    counts = torch.tensor([_blocks(length, block_size) for length in lengths])
    window = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    first = counts.cumsum(0) - counts
    place = torch.arange(int(counts.sum())) - first[window]
    positions = place[:, None] * block_size + torch.arange(block_size)
    valid = positions < torch.tensor(lengths)[window][:, None]
    widest = int(counts.max())
    dense_place = torch.arange(widest).expand(len(lengths), widest)
    dense_blocks = first[:, None] + torch.minimum(dense_place, counts[:, None] - 1)
    dense_valid = valid[dense_blocks] & (dense_place < counts[:, None])[..., None]
    return BlockLayout(
        lengths=lengths,
        block_size=block_size,
        starts=tuple(first.tolist()),
        positions=to_device(positions, device),
        slots=to_device(valid.flatten().nonzero()[:, 0], device),
        windows=to_device(window[:, None].expand_as(valid)[valid], device),
        neighbours=Neighbours(
            previous=to_device(_neighbour(window, -1), device),
            following=to_device(_neighbour(window, 1), device),
            valid_frames=to_device(valid.sum(1, dtype=torch.int32), device),
        ),
        reaches={reach: _reach(window, valid, *reach, device) for reach in REACHES},
        dense_blocks=to_device(dense_blocks, device),
        dense_places=to_device(window * widest + place, device),
        dense_valid=to_device(dense_valid.flatten(1), device),
    )


def _blocks(frames: int, block_size: int) -> int:
    return -(-frames // block_size)


def _neighbour(window: Tensor, offset: int) -> Tensor:
    """int32 [N]: the block `offset` away where it belongs to the same window, else -1."""
    wanted = torch.arange(len(window)) + offset
    inside = (wanted >= 0) & (wanted < len(window))
    same = window[wanted.clamp(0, len(window) - 1)] == window
    return torch.where(inside & same, wanted, -1).int()


def _reach(window: Tensor, valid: Tensor, look_back: int, look_ahead: int, device: torch.device) -> Reach:
    """Neighbours of each block; a neighbour beyond the window's ends is the block itself, masked out."""
    count = window.shape[0]
    own = torch.arange(count)[:, None]
    wanted = own + torch.arange(-look_back, look_ahead + 1)
    inside = (wanted >= 0) & (wanted < count)
    blocks = torch.where(inside, wanted, own)
    inside &= window[blocks] == window[:, None]
    # Reading the window's own block instead of a stranger's also keeps a stranger's non-finite values out:
    # a masked key still multiplies its value by zero, and zero times NaN is NaN.
    blocks = torch.where(inside, blocks, own)
    mask = (valid[blocks] & inside[..., None]).flatten(1)
    return Reach(
        blocks=to_device(blocks.flatten(), device),
        mask=None if bool(mask.all()) else to_device(mask[:, None, None, :], device),
    )


def equal_length_groups(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of equal lengths together, in order of appearance (the vocoder takes no padding)."""
    by_length: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_length.setdefault(length, []).append(index)
    return list(by_length.values())
