# SPDX-License-Identifier: Apache-2.0
"""A reply being collected from its deltas, with the times at which they came.

The clock is the caller's monotonic one; nothing here waits or talks to a server.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .audio import SAMPLE_RATE, Waveform, empty_waveform, pcm16_from_waveform, wav_header
from .messages import AudioDelta, Delta, Info, TextDelta
from .tool_calls import ToolCall, ToolCallDelta, whole_calls

Clock = Callable[[], float]


@dataclass(frozen=True)
class Timings:
    """Seconds since the request was sent, as the client saw them; None for what never came."""

    first_text: float | None
    first_audio: float | None
    total: float
    audio: float
    """Length of the speech received, in seconds."""

    @property
    def real_time_factor(self) -> float | None:
        """Seconds of waiting a second of speech; below 1 the server is faster than speech."""
        return self.total / self.audio if self.audio else None


@dataclass(frozen=True, eq=False)
class Reply:
    """A whole reply."""

    text: str
    audio: Waveform
    """float32 [S] in [-1, 1], mono, 24 kHz; of no samples when the reply has no speech."""
    info: Info | None
    """The server's account; None when the reply was cut off."""
    timings: Timings
    tool_calls: tuple[ToolCall, ...] = ()
    """Functions that the reply calls; what they give goes into a message of the role `tool`."""

    def wav(self) -> bytes:
        """The speech as the bytes of a WAV file: PCM16, mono, 24 kHz."""
        return wav_header(len(self.audio)) + pcm16_from_waveform(self.audio)

    def save_wav(self, path: str | Path) -> None:
        """Write the speech as a WAV file: PCM16, mono, 24 kHz."""
        Path(path).write_bytes(self.wav())


class ReplyBuilder:
    """Collects deltas in order; `reply` may be taken at any time, also of a reply that was cut off.

    Args:
        clock: monotonic seconds; the request counts as sent when the builder is made.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._ended: float | None = None
        self._texts: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._waveforms: list[Waveform] = []
        self._num_samples = 0
        self._info: Info | None = None
        self._first_text: float | None = None
        self._first_audio: float | None = None

    def add(self, delta: Delta) -> None:
        """Take the next delta, and the time if it is the first of its kind."""
        now = self._clock() - self._started
        if isinstance(delta, TextDelta):
            self._texts.append(delta.text)
            self._first_text = now if self._first_text is None else self._first_text
        elif isinstance(delta, AudioDelta):
            self._waveforms.append(delta.samples)
            self._num_samples += len(delta.samples)
            # A reply that comes whole has a waveform also where it was to have none.
            if len(delta.samples) and self._first_audio is None:
                self._first_audio = now
        elif isinstance(delta, ToolCallDelta):
            self._calls.append(delta)
        else:
            self._info = delta

    def end(self) -> None:
        """Stop the clock: nothing more will come."""
        if self._ended is None:
            self._ended = self._clock() - self._started

    def timings(self) -> Timings:
        """The times so far, or of the whole reply once it has ended."""
        total = self._clock() - self._started if self._ended is None else self._ended
        return Timings(self._first_text, self._first_audio, total, self._num_samples / SAMPLE_RATE)

    def reply(self) -> Reply:
        """The reply so far."""
        audio = np.concatenate(self._waveforms) if self._waveforms else empty_waveform()
        return Reply("".join(self._texts), audio, self._info, self.timings(), whole_calls(self._calls))
