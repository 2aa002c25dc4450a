# SPDX-License-Identifier: Apache-2.0
"""One batch of windows on the device: solved, gathered with kept mel frames, vocoded, copied to the host.

A batch is launched one solver step at a time, so that a more urgent batch can run in between. Launching waits for
nothing, and completion is polled. Independent of the choice of windows that share a batch.

Mel frames of all streams, kept and new, are gathered by an index made on the host, one copy and two gathers, however
many streams there are.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triton_omni.core.gpu import record_event, to_host, upload
from triton_omni.token2wav.chunking import Chunk, Span
from triton_omni.token2wav.networks import Vocoder
from triton_omni.token2wav.ode import Steps
from triton_omni.token2wav.sampler import FlowOptions, Sampler
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
    due_since_ns: int
    """Monotonic time when the chunk's codes had arrived, nanoseconds."""

    @classmethod
    def of(cls, stream: Stream, chunk: Chunk) -> Due:
        """Return a stream's due chunk."""
        return cls(stream, chunk, stream.deadline_ns, stream.is_silent, stream.due_since_ns)

    @property
    def frames(self) -> int:
        """Mel frames solved."""
        return len(self.chunk.solved)

    @property
    def is_streamed(self) -> bool:
        """True if the stream plays while it is made; False for a whole reply."""
        return self.stream.page is not None

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


FLAGS = 3
"""Numbers a window that follow the samples: how many mel frames are not finite, whether all samples are finite, and how
many codes were clamped.
"""


@dataclass(frozen=True)
class FinishedWindow:
    """The result of one window."""

    stream: Stream
    chunk: Chunk
    samples: Tensor
    """fp32 [S] on the host."""
    finite: bool
    """True if no mel frame and no sample is NaN or infinite."""
    clamped_codes: int


@dataclass(frozen=True)
class InFlightBatch:
    """A batch that runs on the device or has finished there."""

    batch: tuple[Due, ...]
    begun_ns: int
    """Monotonic time when its launch began, nanoseconds."""
    began: torch.cuda.Event | None
    """Recorded before the solver; None on the CPU."""
    lengths: tuple[int, ...]
    """Samples of each window."""
    host: Tensor
    """fp32 [sum of lengths, then FLAGS a window]; valid once the batch has finished."""
    solved: torch.cuda.Event | None
    """Recorded after the solver; None on the CPU, where work is done when the call returns."""
    copied: torch.cuda.Event | None

    @property
    def is_solved(self) -> bool:
        """True if the solver, the longer part, has finished."""
        return self.solved is None or bool(self.solved.query())  # type: ignore[no-untyped-call]

    @property
    def frames(self) -> int:
        """Mel frames solved, look-ahead included."""
        return _frames(self.batch)

    @property
    def is_finished(self) -> bool:
        """True if the samples are on the host."""
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]

    def finished_windows(self) -> Iterator[FinishedWindow]:
        """Yield the result of each window; call only after the batch has finished."""
        *samples, flags = torch.split(self.host, [*self.lengths, FLAGS * len(self.batch)])
        for due, waveform, flag in zip(self.batch, samples, flags.view(FLAGS, -1).T.tolist(), strict=True):
            broken, finite, clamped = flag
            yield FinishedWindow(due.stream, due.chunk, waveform, not broken and bool(finite), int(clamped))


@dataclass(eq=False)
class BatchLaunch:
    """A batch that is being launched.

    Args:
        batch: windows with one flow, the most urgent first.
        steps: `launch_batch` of these windows.
    """

    batch: Sequence[Due]
    steps: Steps[InFlightBatch]
    left: list[range] = field(default_factory=list)
    """Pages of streams that were aborted meanwhile, into which the batch still writes."""
    has_begun: bool = False
    """True if any step was launched, so that the batch may hold memory."""
    _ahead: deque[torch.cuda.Event | None] = field(default_factory=deque)

    @property
    def frames(self) -> int:
        """Mel frames solved, look-ahead included."""
        return _frames(self.batch)

    @property
    def steps_ahead(self) -> int:
        """Number of launched steps that the device has not finished."""
        while self._ahead and (self._ahead[0] is None or self._ahead[0].query()):  # type: ignore[no-untyped-call]
            self._ahead.popleft()
        return len(self._ahead)

    def advance(self, device: torch.device) -> InFlightBatch | None:
        """Launch the next step; return the batch in flight if it was the last.

        Raises:
            torch.OutOfMemoryError: see `launch_batch`; there is no step after it.
        """
        self.has_begun = True
        try:
            next(self.steps)
        except StopIteration as end:
            flight: InFlightBatch = end.value
            return flight
        self._ahead.append(record_event(device))
        return None

    def holds(self, stream: Stream) -> bool:
        """Return True if a window of the stream is in the batch."""
        return any(due.stream is stream for due in self.batch)

    def holds_up(self, stream: Stream) -> bool:
        """Return True if the stream's next window must be launched after this batch. Either a window of it is in the
        batch, or the batch writes into its pages.
        """
        pages = stream.pages
        return self.holds(stream) or any(left.start < pages.stop and pages.start < left.stop for left in self.left)


def launch_batch(
    batch: Sequence[Due], sampler: Sampler, vocoder: Vocoder, device: torch.device
) -> Steps[InFlightBatch]:
    """Launch a batch of windows with one flow, one solver step at a time. After the last step, the streams advance to
    their next chunks.

    Raises:
        torch.OutOfMemoryError: the device has no memory for the batch; streams and pages are as before it.
    """
    # Sort by length: chunks of one length share a vocoder batch, and batches of like windows share a layout.
    batch = sorted(batch, key=lambda due: (_length(due.chunk), _made(due.chunk), len(due.chunk.solved)))
    windows = [due.stream.window(due.chunk) for due in batch]
    flow = batch[0].stream.request.flow
    begun_ns, began = time.monotonic_ns(), record_event(device, timing=True)
    before = sampler.past.save([window.past for window in windows], flow.pages)
    try:
        mels = yield from sampler.steps(windows, flow)
        solved = record_event(device)
        spliced = splice(batch, mels)
        sound = _sound(spliced, vocoder)
    except torch.OutOfMemoryError:
        before.restore()
        raise
    spliced.take_on(sound.overlaps)
    copied = record_event(device, timing=True)
    return InFlightBatch(tuple(batch), begun_ns, began, sound.lengths, sound.host, solved, copied)


@dataclass(frozen=True)
class _Sound:
    """Samples of a batch: `InFlightBatch.host`, `InFlightBatch.lengths`, and the streams' overlaps."""

    host: Tensor
    lengths: tuple[int, ...]
    overlaps: tuple[Tensor, ...]


def _sound(spliced: Spliced, vocoder: Vocoder) -> _Sound:
    waveforms = list(vocode([due.chunk for due in spliced.batch], spliced.frames, vocoder))
    finite = torch.cat([torch.isfinite(rows).all(1) for rows in waveforms])
    clamped = torch.stack([due.stream.clamped for due in spliced.batch])
    rows = list(itertools.chain.from_iterable(waveforms))
    for due, row in zip(spliced.batch, rows, strict=True):
        fade_in(row, due.stream.overlap)
    lengths = tuple(len(due.chunk.audio) * vocoder.samples_per_frame for due in spliced.batch)
    parts = [torch.tensor_split(row, [length]) for row, length in zip(rows, lengths, strict=True)]
    # The flags follow the samples: one copy a batch.
    host = to_host(torch.cat([*(audio for audio, _ in parts), spliced.broken, finite.float(), clamped.float()]))
    # Copies, because the next batch may reuse the vocoder's memory.
    return _Sound(host, lengths, tuple(overlap.clone() for _, overlap in parts))


def fade_in(samples: Tensor, before: Tensor) -> None:
    """Fade, in place and linearly, from `before` [s], which another chunk made of the same frames, into `samples` [S],
    S >= s.
    """
    if count := len(before):
        torch.lerp(before, samples[:count], _ramp(count, before.device), out=samples[:count])


@functools.lru_cache(maxsize=1)
def _ramp(count: int, device: torch.device) -> Tensor:
    """Return the shares [count] of the new samples, between 0 and 1; all windows of a vocoder share them."""
    return torch.linspace(0, 1, count + 2, device=device)[1:-1]


def _frames(batch: Sequence[Due]) -> int:
    return sum(due.frames for due in batch)


def _length(chunk: Chunk) -> int:
    """Return the number of mel frames that the vocoder reads, the same for all chunks of a vocoder batch."""
    return len(chunk.vocoder)


def _made(chunk: Chunk) -> tuple[int, int]:
    """Return the range of these frames of which samples are kept."""
    return chunk.made.start, chunk.made.stop


def vocode(chunks: Sequence[Chunk], frames: Tensor, vocoder: Vocoder) -> Iterator[Tensor]:
    """Turn mel frames [sum of T, M] of chunks, concatenated, into waveforms [W, S] of each chunk's audio and overlap;
    chunks of one length run together.
    """
    for length, group in itertools.groupby(chunks, _length):
        together = list(group)
        rows, frames = frames[: len(together) * length], frames[len(together) * length :]
        samples = vocoder(rows.view(len(together), length, -1).transpose(1, 2))
        for (start, stop), alike in itertools.groupby(together, _made):
            own, samples = torch.tensor_split(samples, [sum(1 for _ in alike)])
            yield own[:, start * vocoder.samples_per_frame : stop * vocoder.samples_per_frame]
