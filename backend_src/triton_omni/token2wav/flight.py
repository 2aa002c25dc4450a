# SPDX-License-Identifier: Apache-2.0
"""One batch of windows on its way through the device: solved, vocoded, copied to the host.

Launching waits for nothing, and whether a batch has come through is asked, not waited for. Knows streams and chunks,
not which of them should share a batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triton_omni.streams import record_event
from triton_omni.token2wav.acceleration import Vocoder
from triton_omni.token2wav.chunking import Chunk
from triton_omni.token2wav.sampler import Sampler
from triton_omni.token2wav.splicing import Due, splice
from triton_omni.token2wav.streaming import Stream
from triton_omni.token2wav.transfer import to_host

FLAGS = 3
"""Numbers a window that travel behind the samples: how many mel frames are not finite, whether all samples are, and how
many codes were clamped."""


@dataclass(frozen=True)
class Landed:
    """What became of one window."""

    stream: Stream
    chunk: Chunk
    samples: Tensor
    """fp32 [S] on the host."""
    finite: bool
    """No mel frame and no sample is NaN or infinite."""
    clamped_codes: int


@dataclass(frozen=True)
class Flight:
    """A batch on the device, or through it."""

    batch: tuple[Due, ...]
    lengths: tuple[int, ...]
    """Samples of each window."""
    host: Tensor
    """fp32 [sum of lengths, then FLAGS a window]; valid once landed."""
    solved: torch.cuda.Event | None
    """Recorded behind the solver; None on the CPU, where work is done when it returns."""
    copied: torch.cuda.Event | None

    @property
    def is_solved(self) -> bool:
        """Whether the solver, the longer part, is through."""
        return self.solved is None or bool(self.solved.query())  # type: ignore[no-untyped-call]

    @property
    def has_landed(self) -> bool:
        """Whether the samples are on the host."""
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]

    def land(self) -> Iterator[Landed]:
        """What became of each window; only once it has landed."""
        *samples, flags = torch.split(self.host, [*self.lengths, FLAGS * len(self.batch)])
        for due, waveform, flag in zip(self.batch, samples, flags.view(FLAGS, -1).T.tolist(), strict=True):
            broken, finite, clamped = flag
            yield Landed(due.stream, due.chunk, waveform, not broken and bool(finite), int(clamped))


def take_off(batch: Sequence[Due], sampler: Sampler, vocoder: Vocoder, device: torch.device) -> Flight:
    """Launch a batch of windows with one flow; their streams go on to their next chunks."""
    # Those of one shape side by side: they share a batch of the vocoder, and batches of like windows a layout.
    batch = sorted(batch, key=lambda due: (*_shape(due.chunk), len(due.chunk.solved)))
    mels = sampler.sample([due.stream.window(due.chunk) for due in batch], batch[0].stream.request.flow)
    solved = record_event(device)
    frames, broken = splice(batch, mels)
    waveforms = list(_vocode([due.chunk for due in batch], frames, vocoder))
    finite = torch.cat([torch.isfinite(rows).all(1) for rows in waveforms])
    clamped = torch.stack([due.stream.clamped for due in batch])
    # The flags ride behind the samples: one copy a batch.
    host = to_host(torch.cat([*(rows.flatten() for rows in waveforms), broken, finite.float(), clamped.float()]))
    lengths = itertools.chain.from_iterable([rows.shape[1]] * len(rows) for rows in waveforms)
    return Flight(tuple(batch), tuple(lengths), host, solved, record_event(device))


def _shape(chunk: Chunk) -> tuple[int, int, int]:
    """What chunks that share a batch of the vocoder have in common."""
    return len(chunk.vocoder), chunk.heard.start, chunk.heard.stop


def _vocode(chunks: Sequence[Chunk], frames: Tensor, vocoder: Vocoder) -> Iterator[Tensor]:
    """Mel frames [sum of T, M] of chunks, one behind another, to waveforms [W, S], chunks of one shape together."""
    for (length, start, stop), group in itertools.groupby(chunks, _shape):
        count = sum(1 for _ in group)
        rows, frames = frames[: count * length], frames[count * length :]
        samples = vocoder(rows.view(count, length, -1).transpose(1, 2))
        yield samples[:, start * vocoder.samples_per_frame : stop * vocoder.samples_per_frame]
