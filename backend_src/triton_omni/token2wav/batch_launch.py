# SPDX-License-Identifier: Apache-2.0
"""One batch of windows on its way through the device: solved, vocoded, copied to the host.

It is launched a step of the solver at a time, so that a more urgent batch can go between. Launching waits for nothing,
and whether a batch has come through is asked, not waited for. Knows streams and chunks, not which of them should share
a batch.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from triton_omni.core.streams import record_event
from triton_omni.core.transfer import to_host
from triton_omni.token2wav.acceleration import Vocoder
from triton_omni.token2wav.chunking import Chunk
from triton_omni.token2wav.mel_gather import Due, Spliced, splice
from triton_omni.token2wav.sampler import Sampler
from triton_omni.token2wav.steps import Steps
from triton_omni.token2wav.streaming import Stream

FLAGS = 3
"""Numbers a window that travel behind the samples: how many mel frames are not finite, whether all samples are, and how
many codes were clamped."""


@dataclass(frozen=True)
class FinishedWindow:
    """What became of one window."""

    stream: Stream
    chunk: Chunk
    samples: Tensor
    """fp32 [S] on the host."""
    finite: bool
    """No mel frame and no sample is NaN or infinite."""
    clamped_codes: int


@dataclass(frozen=True)
class InFlightBatch:
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
    def frames(self) -> int:
        """Mel frames solved, look-ahead included."""
        return _frames(self.batch)

    @property
    def is_finished(self) -> bool:
        """Whether the samples are on the host."""
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]

    def finished_windows(self) -> Iterator[FinishedWindow]:
        """What became of each window; only once it has landed."""
        *samples, flags = torch.split(self.host, [*self.lengths, FLAGS * len(self.batch)])
        for due, waveform, flag in zip(self.batch, samples, flags.view(FLAGS, -1).T.tolist(), strict=True):
            broken, finite, clamped = flag
            yield FinishedWindow(due.stream, due.chunk, waveform, not broken and bool(finite), int(clamped))


@dataclass(eq=False)
class BatchLaunch:
    """A batch that is being launched.

    Args:
        batch: windows with one flow, the most urgent first.
        steps: `launch_batch` of them.
    """

    batch: Sequence[Due]
    steps: Steps[InFlightBatch]
    left: list[range] = field(default_factory=list)
    """Pages of streams that were dropped meanwhile, into which it still writes."""
    has_begun: bool = False
    """Whether anything of it was launched, so that it may hold memory."""
    _ahead: deque[torch.cuda.Event | None] = field(default_factory=deque)

    @property
    def frames(self) -> int:
        """Mel frames solved, look-ahead included."""
        return _frames(self.batch)

    @property
    def steps_ahead(self) -> int:
        """Steps that were launched and that the device is not through with."""
        while self._ahead and (self._ahead[0] is None or self._ahead[0].query()):  # type: ignore[no-untyped-call]
            self._ahead.popleft()
        return len(self._ahead)

    def advance(self, device: torch.device) -> InFlightBatch | None:
        """Launch the next step; the batch's flight if it was the last.

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
        """Whether a window of the stream is in it."""
        return any(due.stream is stream for due in self.batch)

    def holds_up(self, stream: Stream) -> bool:
        """Whether a window of the stream may only be launched behind all of it: one is in it, or the stream has pages
        into which it writes."""
        pages = stream.pages
        return self.holds(stream) or any(left.start < pages.stop and pages.start < left.stop for left in self.left)


def launch_batch(
    batch: Sequence[Due], sampler: Sampler, vocoder: Vocoder, device: torch.device
) -> Steps[InFlightBatch]:
    """Launch a batch of windows with one flow, a step of the solver at a time; behind the last, their streams go on to
    their next chunks.

    Raises:
        torch.OutOfMemoryError: the device has no memory for it; streams and pages are as if it had not begun.
    """
    # Those of one length side by side: they share a batch of the vocoder, and batches of like windows a layout.
    batch = sorted(batch, key=lambda due: (_length(due.chunk), _heard(due.chunk), len(due.chunk.solved)))
    windows = [due.stream.window(due.chunk) for due in batch]
    flow = batch[0].stream.request.flow
    before = sampler.past.save([window.past for window in windows], flow.pages)
    try:
        mels = yield from sampler.steps(windows, flow)
        solved = record_event(device)
        spliced = splice(batch, mels)
        host, lengths = _sound(spliced, vocoder)
    except torch.OutOfMemoryError:
        before.restore()
        raise
    spliced.take_on()
    return InFlightBatch(tuple(batch), lengths, host, solved, record_event(device))


def _sound(spliced: Spliced, vocoder: Vocoder) -> tuple[Tensor, tuple[int, ...]]:
    """`InFlightBatch.host` and `InFlightBatch.lengths` of a batch."""
    waveforms = list(vocode([due.chunk for due in spliced.batch], spliced.frames, vocoder))
    finite = torch.cat([torch.isfinite(rows).all(1) for rows in waveforms])
    clamped = torch.stack([due.stream.clamped for due in spliced.batch])
    # The flags ride behind the samples: one copy a batch.
    parts = [*(rows.flatten() for rows in waveforms), spliced.broken, finite.float(), clamped.float()]
    lengths = itertools.chain.from_iterable([rows.shape[1]] * len(rows) for rows in waveforms)
    return to_host(torch.cat(parts)), tuple(lengths)


def _frames(batch: Sequence[Due]) -> int:
    return sum(len(due.chunk.solved) for due in batch)


def _length(chunk: Chunk) -> int:
    """Mel frames that the vocoder reads: what chunks that share a batch of it have in common."""
    return len(chunk.vocoder)


def _heard(chunk: Chunk) -> tuple[int, int]:
    """Of these, from which to which are heard."""
    return chunk.heard.start, chunk.heard.stop


def vocode(chunks: Sequence[Chunk], frames: Tensor, vocoder: Vocoder) -> Iterator[Tensor]:
    """Mel frames [sum of T, M] of chunks, one behind another, to waveforms [W, S], chunks of one length together."""
    for length, group in itertools.groupby(chunks, _length):
        together = list(group)
        rows, frames = frames[: len(together) * length], frames[len(together) * length :]
        samples = vocoder(rows.view(len(together), length, -1).transpose(1, 2))
        for (start, stop), alike in itertools.groupby(together, _heard):
            own, samples = torch.tensor_split(samples, [sum(1 for _ in alike)])
            yield own[:, start * vocoder.samples_per_frame : stop * vocoder.samples_per_frame]
