# SPDX-License-Identifier: Apache-2.0
"""Gathers mel frames of a batch of streams, kept and new, for the vocoder and for the streams' tails.

An index made on the host, one copy and two gathers serve all streams, however many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triton_omni.core.streams import upload
from triton_omni.token2wav.chunking import Chunk, Span
from triton_omni.token2wav.sampler import FlowOptions
from triton_omni.token2wav.streaming import Stream


@dataclass(frozen=True)
class Due:
    """A chunk whose codes have arrived."""

    stream: Stream
    chunk: Chunk
    deadline_ns: int
    """See `Stream.deadline_ns`, before the chunk is launched."""
    is_first: bool
    """See `Stream.is_silent`, before the chunk is launched."""

    @classmethod
    def of(cls, stream: Stream, chunk: Chunk) -> Due:
        """Return a stream's due chunk."""
        return cls(stream, chunk, stream.deadline_ns, stream.is_silent)

    @property
    def frames(self) -> int:
        """Mel frames of the window."""
        return len(self.chunk.solved)

    @property
    def is_streamed(self) -> bool:
        """True if the stream plays while it is made; False for a whole reply."""
        return self.stream.page is not None

    @property
    def opened_ns(self) -> int:
        """Monotonic time when the stream was opened, nanoseconds."""
        return self.stream.opened_ns

    @property
    def due_since_ns(self) -> int:
        """Monotonic time when the chunk's codes had arrived, nanoseconds."""
        return self.stream.due_since_ns

    @property
    def flow(self) -> FlowOptions:
        """Solver and its steps: windows of one batch have the same."""
        return self.stream.request.flow


@dataclass(frozen=True)
class Spliced:
    """Mel frames of a batch's windows, arranged for vocoder and streams."""

    batch: Sequence[Due]
    frames: Tensor
    """[sum of the chunks' vocoder frames, M], the chunks concatenated."""
    broken: Tensor
    """fp32 [W], how many mel frames of each window are not finite."""
    tails: Sequence[Tensor]
    """Tail that each stream keeps: views of one tensor, which is freed with the last of them (half a megabyte for
    32).
    """

    def take_on(self, overlaps: Sequence[Tensor]) -> None:
        """Advance the streams past their chunks, whose overlaps are `overlaps`; this allocates no device memory."""
        for due, tail, overlap in zip(self.batch, self.tails, overlaps, strict=True):
            due.stream.advance(due.chunk, tail, overlap)


def splice(batch: Sequence[Due], mels: Sequence[Tensor]) -> Spliced:
    """Gather the frames of a batch; its streams do not change until `take_on`.

    Args:
        batch: the chunks whose windows were solved.
        mels: [T, M] of each window, fp32.
    """
    source = torch.cat([*(due.stream.tail for due in batch), *mels])
    tails, lengths = [len(due.stream.tail) for due in batch], [len(mel) for mel in mels]
    starts = np.cumsum([0, *tails, *lengths])
    later = [due.stream.needed_later(due.chunk) for due in batch]
    vocoded, kept = [], []
    for number, (due, span) in enumerate(zip(batch, later, strict=True)):
        behind_tail, mel = starts[number + 1], starts[len(batch) + number]
        vocoded.append(_places(due.chunk.vocoder, due.chunk.solved.start, behind_tail, mel))
        kept.append(_places(span, due.chunk.solved.start, behind_tail, mel))
    windows = np.repeat(np.arange(len(batch)), lengths)
    to_vocoder, to_tails, of_window = upload([np.concatenate(vocoded), np.concatenate(kept), windows], source.device)
    parts = torch.split(source.index_select(0, to_tails), [len(span) for span in later])
    broken = (~torch.isfinite(source[starts[len(batch)] :]).all(1)).float()
    counts = torch.zeros(len(batch), device=source.device).index_add_(0, of_window, broken)
    return Spliced(batch, source.index_select(0, to_vocoder), counts, parts)


def _places(span: Span, first: int, behind_tail: int, mel: int) -> NDArray[np.int64]:
    """Return the rows of the frames in `span`: frames before `first` are the tail's last, the others the window's."""
    frames = np.arange(span.start, span.end) - first
    return np.where(frames < 0, behind_tail + frames, mel + frames)
