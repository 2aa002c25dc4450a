# SPDX-License-Identifier: Apache-2.0
"""State of one stream between chunks: codes received, mel frames kept for the vocoder, number of the next chunk.

Independent of the networks; codes and mel frames stay on the device.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from triton_omni.core.errors import TooLarge
from triton_omni.token2wav.chunking import Chunk, Span, WindowPlan
from triton_omni.token2wav.dit import Voice
from triton_omni.token2wav.sampler import FlowOptions, Window
from triton_omni.token2wav.window_cache import WindowCacheUse

WHOLE_REPLY_WAITS_NS: Final = 1_000_000_000
"""Nanoseconds for which a whole reply, which does not play yet, lets the windows of streams go first."""


@dataclass(frozen=True)
class StreamRequest:
    """Options of a stream, set when it is opened."""

    voice: Voice
    seed: int
    plan: WindowPlan
    flow: FlowOptions
    guidance_scale: float
    frame_ns: int = 0
    """Duration of a mel frame, nanoseconds."""
    lead_ns: int | None = None
    """Maximum sound buffered by the client before the next chunk is due, nanoseconds; None = no maximum."""


@dataclass
class Stream:
    """One stream.

    Attributes:
        codes: int32 [max codes] on the device, `received` of them valid and each within the codec's table.
        arrived: the same codes as received.
        tail: [t, M] on the device, the last mel frames kept, up to the next chunk's first.
        overlap: fp32 [s] on the device, samples from which the next chunk fades in; none before the first chunk.
        page: first page of the stream's window cache; None for a whole reply in one window.
        ended_ns: monotonic time when the stream ended, nanoseconds; 0 before.
        sound_until_ns: monotonic time when the launched sound ends, nanoseconds; 0 before.
        due_since_ns: monotonic time when the next chunk's codes had arrived, nanoseconds; undefined before.
        finished: True if the final chunk was launched.
    """

    key: str
    request: StreamRequest
    codes: Tensor
    arrived: Tensor
    tail: Tensor
    overlap: Tensor
    opened_ns: int
    page: int | None = None
    received: int = 0
    ended_ns: int = 0
    next_chunk: int = 0
    sound_until_ns: int = 0
    due_since_ns: int = 0
    finished: bool = False
    _due: Chunk | None = None

    @classmethod
    def create(cls, key: str, request: StreamRequest, *, max_codes: int, mel_dim: int, device: torch.device) -> Stream:
        """Create a stream without codes."""
        return cls(
            key=key,
            request=request,
            codes=torch.zeros(max_codes, dtype=torch.int32, device=device),
            arrived=torch.zeros(max_codes, dtype=torch.int32, device=device),
            tail=torch.empty(0, mel_dim, device=device),
            overlap=torch.empty(0, device=device),
            opened_ns=time.monotonic_ns(),
        )

    def feed(self, codes: Tensor, last_code: int) -> None:
        """Copy `codes` (int [N], any device), as received and clamped to [0, last_code].

        Raises:
            TooLarge: the stream would exceed its code buffer.
        """
        end = self.received + codes.shape[0]
        if end > self.codes.shape[0]:
            raise TooLarge(f"codes: {end} exceed max_codes {self.codes.shape[0]}", stage="token2wav")
        # Two operations, since the next window waits for them; clamped codes are counted later.
        arrived = self.arrived[self.received : end].copy_(codes)
        torch.clamp(arrived, 0, last_code, out=self.codes[self.received : end])
        self.received = end
        self._find_due()

    @property
    def clamped(self) -> Tensor:
        """Number of received codes outside the table, int64 scalar on the device."""
        return (self.arrived[: self.received] != self.codes[: self.received]).sum()

    def end(self) -> None:
        """Mark that no more codes will come."""
        self.ended_ns = self.ended_ns or time.monotonic_ns()
        self._find_due()

    @property
    def pages(self) -> range:
        """Pages of the stream's window cache; none for a whole reply in one window."""
        return range(0) if self.page is None else range(self.page, self.page + self.request.flow.pages)

    @property
    def ended(self) -> bool:
        """True if no more codes will come."""
        return self.ended_ns > 0

    def due(self) -> Chunk | None:
        """Return the next chunk, or None while its codes are missing or its client has enough sound buffered. Called
        several times an iteration of the stage's loop.
        """
        return None if self._due is not None and self._is_ahead else self._due

    @property
    def _is_ahead(self) -> bool:
        lead_ns = self.request.lead_ns
        return lead_ns is not None and self.sound_until_ns - time.monotonic_ns() > lead_ns

    def _find_due(self) -> None:
        plan, before = self.request.plan, self._due
        self._due = None if self.finished else plan.chunk(self.next_chunk, self.received, ended=self.ended)
        if before is None or self._due is None or before.index != self._due.index:
            self.due_since_ns = time.monotonic_ns()

    @property
    def wanted(self) -> int:
        """Number of codes, from the first on, that make the next chunk due that is not due yet."""
        index = self.next_chunk
        while (needed := self.request.plan.codes_needed(index)) <= self.received:
            index += 1
        return needed

    @property
    def is_silent(self) -> bool:
        """True if the stream plays while it is made, and has no sound yet because nothing was launched."""
        return self.page is not None and not self.sound_until_ns

    @property
    def wants_first_codes(self) -> bool:
        """True if the stream has no sound yet because its first codes are missing."""
        return self.is_silent and self.due() is None

    @property
    def deadline_ns(self) -> int:
        """Monotonic time when the stream runs out of sound, nanoseconds. For a stream without sound it is the opening,
        for a whole reply a while after its end.
        """
        if self.page is None:
            return self.ended_ns + WHOLE_REPLY_WAITS_NS
        return self.sound_until_ns or self.opened_ns

    def window(self, chunk: Chunk) -> Window:
        """Return the sampler's input for `chunk`."""
        per_code = self.request.plan.frames_per_code
        return Window(
            codes=self.codes[chunk.solved.start // per_code : chunk.solved.end // per_code],
            first_frame=chunk.solved.start,
            seed=self.request.seed,
            voice=self.request.voice,
            guidance_scale=self.request.guidance_scale,
            past=self._past(chunk),
        )

    def _past(self, chunk: Chunk) -> WindowCacheUse | None:
        if self.page is None:
            return None
        return WindowCacheUse(self.page, chunk.index > 0, 0 if chunk.final else len(chunk.kept))

    def needed_later(self, chunk: Chunk) -> Span:
        """Return the mel frames that a chunk after `chunk` needs, of those kept up to and with `chunk`."""
        return Span(self.request.plan.tail_start(chunk), chunk.kept.end)

    def advance(self, chunk: Chunk, tail: Tensor, overlap: Tensor) -> None:
        """Advance past `chunk`, which was launched; `tail` are the frames of `needed_later`, `overlap` the samples of
        the chunk's overlap.
        """
        self.tail, self.overlap = tail, overlap
        # A stream that ran out of sound plays this chunk from now on, so its deadline does not stay in the past.
        begins_ns = max(self.sound_until_ns, time.monotonic_ns())
        self.sound_until_ns = begins_ns + len(chunk.audio) * self.request.frame_ns
        self.next_chunk += 1
        self.finished = chunk.final
        self._find_due()
