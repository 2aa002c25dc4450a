# SPDX-License-Identifier: Apache-2.0
"""One batch of windows on its way through the device: solved, vocoded, copied to the host.

Launching waits for nothing, and whether a batch has come through is asked, not waited for. Knows streams and chunks,
not which of them should share a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triton_omni.token2wav.acceleration import Vocoder
from triton_omni.token2wav.batching import equal_length_groups
from triton_omni.token2wav.chunking import Chunk
from triton_omni.token2wav.sampler import Sampler
from triton_omni.token2wav.streaming import Stream
from triton_omni.token2wav.transfer import to_host

FLAGS = 2
"""Numbers that travel behind the samples: whether the chunk is finite, how many codes were clamped."""


@dataclass(frozen=True)
class Due:
    """A chunk whose codes are there."""

    stream: Stream
    chunk: Chunk
    deadline_ns: int
    """See `Stream.deadline_ns`, before the chunk is launched."""


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
        finite, clamped = flags.view(FLAGS, -1).tolist()
        for due, waveform, ok, count in zip(self.batch, samples, finite, clamped, strict=True):
            yield Landed(due.stream, due.chunk, waveform, bool(ok), int(count))


def take_off(batch: Sequence[Due], sampler: Sampler, vocoder: Vocoder, device: torch.device) -> Flight:
    """Launch a batch of windows with one flow; their streams go on to their next chunks."""
    mels = sampler.sample([due.stream.window(due.chunk) for due in batch], batch[0].stream.request.flow)
    solved = _mark(device)
    vocoded = [due.stream.advance(due.chunk, mel) for due, mel in zip(batch, mels, strict=True)]
    rate = vocoder.samples_per_frame
    samples = [_trim(due.chunk, row, rate) for due, row in zip(batch, _vocode(vocoded, vocoder), strict=True)]
    finite = [torch.isfinite(m).all() & torch.isfinite(s).all() for m, s in zip(mels, samples, strict=True)]
    flags = torch.stack([*finite, *(due.stream.clamped for due in batch)]).float()
    # The flags ride behind the samples: one copy a batch.
    host = to_host(torch.cat([*samples, flags]))
    return Flight(tuple(batch), tuple(map(len, samples)), host, solved, _mark(device))


def _vocode(mels: Sequence[Tensor], vocoder: Vocoder) -> list[Tensor]:
    """Mel frames [T, M] each to waveforms [S] each; equal lengths share a batch."""
    waveforms: dict[int, Tensor] = {}
    for group in equal_length_groups([len(mel) for mel in mels]):
        rows = vocoder(torch.stack([mels[index] for index in group]).transpose(1, 2))
        waveforms.update(zip(group, rows, strict=True))
    return [waveforms[index] for index in range(len(mels))]


def _trim(chunk: Chunk, waveform: Tensor, rate: int) -> Tensor:
    start = (chunk.audio.start - chunk.vocoder.start) * rate
    return waveform[start : start + len(chunk.audio) * rate]


def _mark(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
