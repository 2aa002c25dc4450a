# SPDX-License-Identifier: Apache-2.0
"""Unequal windows of mel frames as one ragged batch of whole attention blocks, and back.

Windows are laid one after another in blocks, so that only a window's last block can hold padding.
Pure index arithmetic; knows nothing of the networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

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
class BlockLayout:
    """Where W windows lie in a batch of N blocks, and which blocks are neighbours in time."""

    lengths: tuple[int, ...]
    """Mel frames of each window."""
    block_size: int
    positions: Tensor
    """int64 [N, block]: frame number within the window."""
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

    def pack(self, windows: Sequence[Tensor]) -> Tensor:
        """Lay windows ([T, F] each, the layout's lengths) into blocks [N, block, F]; padding is zero."""
        padded = [F.pad(window, (0, 0, 0, -window.shape[0] % self.block_size)) for window in windows]
        return torch.cat(padded).view(-1, self.block_size, windows[0].shape[-1])

    def unpack(self, blocks: Tensor) -> list[Tensor]:
        """Take the windows [T, F] out of blocks [N, block, F]; the inverse of `pack`."""
        rows = blocks.reshape(-1, blocks.shape[-1])
        counts = [_blocks(length, self.block_size) * self.block_size for length in self.lengths]
        return [part[:length] for part, length in zip(torch.split(rows, counts), self.lengths, strict=True)]


def block_layout(lengths: Sequence[int], block_size: int, device: torch.device) -> BlockLayout:
    """Lay out windows of `lengths` mel frames (each at least 1) in blocks of `block_size`."""
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
        lengths=tuple(lengths),
        block_size=block_size,
        positions=positions.to(device),
        reaches={reach: _reach(window, valid, *reach, device) for reach in REACHES},
        dense_blocks=dense_blocks.to(device),
        dense_places=(window * widest + place).to(device),
        dense_valid=dense_valid.flatten(1).to(device),
    )


def _blocks(frames: int, block_size: int) -> int:
    return -(-frames // block_size)


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
        blocks=blocks.flatten().to(device), mask=None if bool(mask.all()) else mask[:, None, None, :].to(device)
    )


def equal_length_groups(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of equal lengths together, in order of appearance (the vocoder takes no padding)."""
    by_length: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_length.setdefault(length, []).append(index)
    return list(by_length.values())
