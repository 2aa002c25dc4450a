# SPDX-License-Identifier: Apache-2.0
"""Window KV cache: keys and values of the block before a stream's next window, kept instead of computed again.

Layers that look back see one block. The window that kept that block computed them, at the same evaluation of the solver
and for the same half of guidance. A stream stores them in its *pages*, one for each evaluation and half; every window
reads and then overwrites them. So a window starts with its first new frame.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triton_omni.checkpoint.facts import DitConfig
from triton_omni.core.gpu import upload
from triton_omni.core.spans import FirstFit
from triton_omni.token2wav.attention import Rotary
from triton_omni.token2wav.batching import BlockLayout
from triton_omni.token2wav.ode import GRIDS_KEPT

NONE = -1
"""Stands for no page."""


@dataclass(frozen=True)
class WindowCacheUse:
    """Use of a stream's pages by one window."""

    page: int
    """The stream's first page."""
    is_left: bool
    """True if an earlier window has written the pages."""
    kept_frames: int
    """Mel frames of the window's whole blocks, the last of which is left to the next window; 0 when none follows."""


@dataclass(frozen=True)
class LayerKVCache:
    """Pages that one layer reads and writes at one evaluation of N blocks.

    A window's first block reads the page that a later block, or the same one, writes: all reads come before any write.
    """

    pages: Tensor
    """[P + 1, block, 2 x inner]: the layer's keys, not rotated, and values side by side; the last page belongs to no
    stream.
    """
    number: Tensor
    """int32 [], number of the evaluation, on the device."""
    found: Tensor
    """int32 [N], see `WindowKVCache`."""
    left: Tensor
    """int32 [N], see `WindowKVCache`."""
    rotary: Rotary
    """Angles [block, 1, head_dim / 2] of the block before a window's first."""

    def find(self, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys (not rotated) and values before each block, [N, block, heads, head_dim], and a mask [N] of blocks
        that have them.

        Without a page both are zero, whatever the pages contain.
        """
        there = self.found != NONE
        rows = torch.where(there[:, None, None], self.pages.index_select(0, self._pages_at(self.found)), 0.0)
        key, value = rows.view(*rows.shape[:2], 2, heads, -1).unbind(2)
        return key, value, there

    def write(self, key: Tensor, value: Tensor) -> None:
        """Write the keys, not rotated, and values [N, block, heads, head_dim] of the blocks in `left`, all whole."""
        rows = torch.cat([key.flatten(2), value.flatten(2)], dim=-1)
        self.pages.index_copy_(0, self._pages_at(self.left), rows)

    def _pages_at(self, first: Tensor) -> Tensor:
        """Return int64 [N]: pages of this evaluation, the last page where there is none."""
        return torch.where(first == NONE, len(self.pages) - 1, first + self.number).long()


@dataclass(frozen=True)
class WindowKVCache:
    """Pages that the N blocks of a batch, all halves of guidance in turn, read and write."""

    pool: WindowCachePool
    found: Tensor
    """int32 [N]: first page to read before the block, -1 for none."""
    left: Tensor
    """int32 [N]: first page that the block writes, -1 for none."""
    numbers: Tensor
    """int32 [E], numbers of the evaluations, on the device."""

    def at(self, evaluation: int, layer: int) -> LayerKVCache | None:
        """Return the pages of `layer` at the `evaluation`-th of `numbers`; None if the layer has no look-back."""
        if layer not in self.pool.layers:
            return None
        pages = self.pool.pages[:, self.pool.layers.index(layer)]
        return LayerKVCache(pages, self.numbers[evaluation], self.found, self.left, self.pool.rotary)


@dataclass(frozen=True)
class HostWindowKVCache:
    """The same, on the host."""

    pool: WindowCachePool
    pages: NDArray[np.int64]
    """[2, N]: what `WindowKVCache.found` and `WindowKVCache.left` hold."""
    evaluations: int
    """E."""

    def upload(self) -> WindowKVCache:
        """Copy it to the device."""
        device = self.pool.pages.device
        found, left = upload([*self.pages], device)
        return WindowKVCache(self.pool, found.int(), left.int(), evaluation_numbers(self.evaluations, device))


@functools.lru_cache(maxsize=GRIDS_KEPT)
def evaluation_numbers(count: int, device: torch.device) -> Tensor:
    """Return int32 [count], from 0 on; cached, so not to be written to."""
    return torch.arange(count, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class SavedPages:
    """Contents of pages that a batch overwrites, to restore if the batch runs out of memory."""

    pages: Sequence[Tensor]
    """Views of the pool, P pages each."""
    rows: Sequence[Tensor]
    """Their contents."""

    def restore(self) -> None:
        """Write the contents back, after all that was launched; this allocates no device memory."""
        for page, row in zip(self.pages, self.rows, strict=True):
            page.copy_(row)


class WindowCachePool:
    """The pages of all streams, at one fixed address.

    Pages are not cleared: a stream's first window reads none, so no stream reads pages of another.

    Args:
        config: sizes of the DiT.
        rotary: angles [block, 1, head_dim / 2] of the block before a window's first.
        pages: number of pages that all open streams share.
        dtype: of keys and values.
        device: device of the pages.
    """

    def __init__(
        self, config: DitConfig, rotary: Rotary, pages: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = config.look_backward_layers
        self.rotary = rotary
        sizes = (len(self.layers), config.block_size, 2 * config.num_heads * config.head_dim)
        self.pages = torch.zeros(pages + 1, *sizes, dtype=dtype, device=device)
        self._spans = FirstFit(pages)

    @property
    def capacity(self) -> int:
        """Number of pages that streams can have."""
        return self._spans.capacity

    @property
    def used(self) -> int:
        """Number of pages that open streams have."""
        return self._spans.used

    def allocate(self, pages: int, *, avoid: Sequence[range] = ()) -> int | None:
        """Return the first of `pages` pages for one stream, or None if they are not free. Pages to `avoid` are used
        only if there are no others.
        """
        page = self._spans.allocate(pages, avoid=avoid)
        return self._spans.allocate(pages) if page is None else page

    def free(self, page: int) -> None:
        """Free what `allocate` returned."""
        self._spans.free(page)

    def save(self, windows: Sequence[WindowCacheUse | None], pages: int) -> SavedPages:
        """Copy the pages that a batch of `windows` reads and then overwrites, `pages` a stream.

        A stream's first window reads nothing, and its last leaves nothing.
        """
        both = [past.page for past in windows if past is not None and past.is_left and past.kept_frames]
        views = [self.pages[page : page + pages] for page in both]
        return SavedPages(views, torch.split(torch.cat(views), pages) if views else ())

    def of_batch(
        self, windows: Sequence[WindowCacheUse | None], layout: BlockLayout, *, evaluations: int, halves: int
    ) -> HostWindowKVCache:
        """Return the pages of a batch of `windows`, laid out by `layout` in each of `halves`; None is a window without
        cache.
        """
        pages = np.full((2, layout.num_blocks), NONE)
        for first, past in zip(layout.starts, windows, strict=True):
            if past is not None and past.is_left:
                pages[0, first] = past.page
            if past is not None and past.kept_frames:
                pages[1, first + past.kept_frames // layout.block_size - 1] = past.page
        # Each half of guidance has its own pages, after those of the previous half.
        later = evaluations * np.arange(halves)[:, None]
        ours = np.where(pages[:, None] == NONE, NONE, pages[:, None] + later).reshape(2, -1)
        return HostWindowKVCache(self, ours, evaluations)
