# SPDX-License-Identifier: Apache-2.0
"""When somebody begins and ends to speak, by the probability of speech in each moment. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

CHUNK_SAMPLES: Final = 512
CHUNK_MS: Final = 32
_FIRST_CHUNKS: Final = 2
"""So many in a row begin speech: a click is one."""
_HYSTERESIS: Final = 0.15
"""How far under the threshold a moment is silent once somebody speaks, as Silero's own iterator has it."""


class Voice(Protocol):
    """Tells speech from other sound, moment by moment."""

    def probability(self, pcm: bytes) -> float:
        """That the next 512 samples, PCM16 at 16 kHz, are speech."""

    def reset(self) -> None:
        """Forget what was heard."""


@dataclass(frozen=True)
class Started:
    """Somebody speaks since a place, milliseconds; what led to it is included."""

    begin_ms: int


@dataclass(frozen=True)
class Paused:
    """Whoever speaks since `begin_ms` has paused until `end_ms`, and may have ended."""

    begin_ms: int
    end_ms: int


@dataclass(frozen=True)
class Stopped:
    """Nobody speaks any more; `end_ms` is where that was certain."""

    end_ms: int


Change = Started | Paused | Stopped


class TurnDetector:
    """Finds turns in a stream of sound.

    Args:
        voice: tells speech from other sound.
        threshold: probability from which on a moment is speech.
        padding_ms: sound before speech that belongs to it.
        silence_ms: without speech end a turn.
        pause_ms: without speech are told once as a pause; None = pauses are not told.
    """

    def __init__(
        self,
        voice: Voice,
        *,
        threshold: float,
        padding_ms: int,
        silence_ms: int,
        pause_ms: int | None = None,
    ) -> None:
        self._voice = voice
        self._threshold = threshold
        self._padding_ms = padding_ms
        self._silence_ms = silence_ms
        self._pause_ms = pause_ms
        self._rest = b""
        self._place_ms = 0
        self._loud = 0
        """Chunks of speech in a row, while nobody speaks."""
        self._silent_ms = 0
        self._begin_ms: int | None = None
        """Where the turn begins; None while nobody speaks."""

    @property
    def speaks(self) -> bool:
        """True while somebody speaks."""
        return self._begin_ms is not None

    @property
    def needed_from_ms(self) -> int:
        """Sound before this place belongs to no turn."""
        if self._begin_ms is not None:
            return self._begin_ms
        return max(0, self._place_ms - self._padding_ms - _FIRST_CHUNKS * CHUNK_MS)

    def start_at(self, place_ms: int) -> None:
        """Begin anew with the sound at a place."""
        self._voice.reset()
        self._rest, self._place_ms, self._loud, self._silent_ms, self._begin_ms = b"", place_ms, 0, 0, None

    def feed(self, pcm: bytes) -> Iterator[Change]:
        """Take the next sound, PCM16 at 16 kHz, and tell what changes."""
        data = self._rest + pcm
        size = CHUNK_SAMPLES * 2
        whole = len(data) - len(data) % size
        self._rest = data[whole:]
        for at in range(0, whole, size):
            self._place_ms += CHUNK_MS
            probability = self._voice.probability(data[at : at + size])
            if (change := self._silence(probability) if self.speaks else self._speech(probability)) is not None:
                yield change

    def _speech(self, probability: float) -> Change | None:
        self._loud = self._loud + 1 if probability >= self._threshold else 0
        if self._loud < _FIRST_CHUNKS:
            return None
        self._begin_ms = max(0, self._place_ms - self._loud * CHUNK_MS - self._padding_ms)
        self._loud = self._silent_ms = 0
        return Started(self._begin_ms)

    def _silence(self, probability: float) -> Change | None:
        if probability >= self._threshold:
            self._silent_ms = 0
        elif self._silent_ms or probability < self._threshold - _HYSTERESIS:
            before, self._silent_ms = self._silent_ms, self._silent_ms + CHUNK_MS
            if self._silent_ms >= self._silence_ms:
                return self.stop()
            if self._pause_ms is not None and before < self._pause_ms <= self._silent_ms:
                return Paused(self.needed_from_ms, self._place_ms)
        return None

    def stop(self) -> Stopped:
        """End the turn here."""
        self._begin_ms = None
        return Stopped(self._place_ms)
