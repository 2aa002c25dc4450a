# SPDX-License-Identifier: Apache-2.0
"""Codes and mel frames of each chunk, and when a chunk is due (pure).

The windows follow from the plan and the reply's length alone, not from load or timing.

One regular chunk::

    codes        ...........|===========|===========|===========|....
    past         .          [ last kept ]                              what the DiT's look-back sees, not solved again
    solved       .                      [  kept     | look-ahead]      the window of the DiT
    kept         .                      [start   end]                  mel frames made for good
    vocoder      .                  [  ctx  |  audio    |  ctx  ]      mel frames into BigVGAN
    audio        .                          [===========]              samples given out
    overlap      .                                      [-]            samples from which the next chunk fades in

- Look-back costs no frames: the window before left what it kept in its last block (`window_cache.py`). This
  is exact. A streamed reply differs from the whole one because no window sees beyond its look-ahead.
- Look-ahead frames are solved again by the window that keeps them.
- Before `start` the vocoder reads mel frames that *earlier* windows kept (the stream's tail). From `start` on it reads
  this window's kept frames and then, as right context, its look-ahead frames. If the context is shorter than the
  look-ahead, the first look-ahead frames give sound as well.
- The next chunk solves the look-ahead frames anew, so its first samples do not continue this chunk's last ones: a
  click. This chunk therefore makes one frame of samples more, and the next chunk fades from them into its own.
- Audio ends one vocoder context before the window does, and the next chunk begins there. So every sample has its full
  context on both sides, except at the reply's ends, where the vocoder pads as it does offline. Audio ends after `end`,
  as drawn, if the look-ahead is longer than the context, and before `end` if it is shorter.
- A chunk is regular if the reply has more codes than the chunk keeps, and at least its look-ahead. Otherwise it is the
  final chunk and covers all that is left: at most one look-ahead more than a regular chunk. Nothing follows it.
- For a final chunk the vocoder reads as many frames as for some regular one, if the reply has them: more of those
  before it. Replies have any length, but vocoder passes are recorded for a few lengths only.
- Offline is the plan whose first chunk is never full: the final chunk is the whole reply.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass

from triton_omni.core.settings import FRAMES_PER_BLOCK, FRAMES_PER_CODE, StreamingPlan

UNBOUNDED = sys.maxsize
OVERLAP_FRAMES = 1
"""Mel frames over which a chunk fades into the next one."""


@dataclass(frozen=True)
class Span:
    """Mel frames [start, end) by absolute number in the stream."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Chunk:
    """One chunk of a stream; see the drawing above."""

    index: int
    final: bool
    solved: Span
    kept: Span
    vocoder: Span
    audio: Span

    @property
    def overlap(self) -> Span:
        """Mel frames after `audio` from whose samples the next chunk fades in; none after a final chunk."""
        return Span(self.audio.end, min(self.audio.end + OVERLAP_FRAMES, self.vocoder.end))

    @property
    def made(self) -> slice:
        """The mel frames of `vocoder` that are `audio` or `overlap`."""
        return slice(self.audio.start - self.vocoder.start, self.overlap.end - self.vocoder.start)


@dataclass(frozen=True)
class WindowPlan:
    """A streaming plan in codes and frames of the model at hand."""

    chunk_codes: tuple[int, ...]
    """New codes of chunk 0, 1, ...; the last entry repeats."""
    look_ahead_codes: int
    """Codes after a chunk that its window also sees."""
    vocoder_context: int
    """Mel frames of context on each side, at least 1 if chunks follow each other."""
    frames_per_code: int

    @functools.cached_property
    def regular_chunks(self) -> tuple[Chunk, ...]:
        """The first chunks of an endless reply, up to one that all later ones equal in shape."""
        # One more than listed, and as many as the vocoder's context may reach back to the beginning: audio that lags by
        # one context at most.
        reached = 2 * self.vocoder_context // (self.frames_per_code * min(self.chunk_codes))
        chunks = (self.chunk(index, UNBOUNDED, ended=False) for index in range(len(self.chunk_codes) + 1 + reached))
        return tuple(chunk for chunk in chunks if chunk is not None)

    @functools.cached_property
    def vocoder_lengths(self) -> tuple[int, ...]:
        """Numbers of mel frames that BigVGAN reads for regular chunks, ascending."""
        return tuple(sorted({len(chunk.vocoder) for chunk in self.regular_chunks}))

    def chunk(self, index: int, codes: int, *, ended: bool) -> Chunk | None:
        """Return chunk `index` of a stream that has `codes` codes, or None while it is not due.

        Args:
            index: from 0; the chunk before it must not have been final.
            codes: received so far.
            ended: True if no more codes will come.
        """
        start = self._first_code(index)
        end = start + self._size(index)
        if codes >= self.codes_needed(index):
            return self._chunk(index, start, end, end + self.look_ahead_codes, final=False)
        return self._chunk(index, start, codes, codes, final=True) if ended else None

    def codes_needed(self, index: int) -> int:
        """Return the number of codes that make chunk `index` due before the stream has ended."""
        return self._first_code(index) + self._size(index) + max(self.look_ahead_codes, 1)

    def tail_start(self, chunk: Chunk) -> int:
        """Return the first mel frame that the chunk after `chunk` may need, `kept.end` if none: earlier ones can be
        dropped."""
        return min(chunk.kept.end, max(0, chunk.audio.end - max(self.vocoder_lengths, default=0)))

    def _chunk(self, index: int, start: int, end: int, solved_end: int, *, final: bool) -> Chunk:
        frames = self.frames_per_code
        audio_start = 0 if index == 0 else start * frames - self._lag
        audio_end = end * frames - (0 if final else self._lag)
        context = self.vocoder_context
        vocoder = Span(max(0, audio_start - context), min(audio_end + context, solved_end * frames))
        return Chunk(
            index=index,
            final=final,
            solved=Span(start * frames, solved_end * frames),
            kept=Span(start * frames, end * frames),
            vocoder=self._of_regular_length(vocoder) if final else vocoder,
            audio=Span(audio_start, audio_end),
        )

    def _of_regular_length(self, span: Span) -> Span:
        """Return the frames of a final chunk, with as many before it as make a regular length."""
        length = next((length for length in self.vocoder_lengths if len(span) <= length <= span.end), len(span))
        return Span(span.end - length, span.end)

    @property
    def _lag(self) -> int:
        """Mel frames by which audio ends before the kept ones; below zero if after them."""
        return self.vocoder_context - self.look_ahead_codes * self.frames_per_code

    def _size(self, index: int) -> int:
        return self.chunk_codes[min(index, len(self.chunk_codes) - 1)]

    def _first_code(self, index: int) -> int:
        listed = self.chunk_codes[:index]
        return sum(listed) + (index - len(listed)) * self.chunk_codes[-1]


def streaming_plan(
    plan: StreamingPlan, *, block_frames: int = FRAMES_PER_BLOCK, frames_per_code: int = FRAMES_PER_CODE
) -> WindowPlan:
    """Turn blocks into codes; `block_frames` is the DiT's block size, a multiple of `frames_per_code`."""
    block = block_frames // frames_per_code
    return WindowPlan(
        chunk_codes=tuple(blocks * block for blocks in plan.chunk_blocks),
        look_ahead_codes=plan.look_ahead_codes,
        vocoder_context=plan.vocoder_context_frames,
        frames_per_code=frames_per_code,
    )


def offline_plan(*, frames_per_code: int) -> WindowPlan:
    """Return the plan of a whole reply in one window."""
    return WindowPlan((UNBOUNDED,), 0, 0, frames_per_code)
