# SPDX-License-Identifier: Apache-2.0
"""The sound that a client appended and that is no item yet: PCM16 at 16 kHz, by its place in all that came. Pure."""

from __future__ import annotations

from triton_omni_gateway.errors import bad_request

from .formats import BYTES_A_MS


class InputBuffer:
    """Sound by its place: milliseconds since the session's first sample.

    Args:
        most_seconds: that may wait here.
    """

    def __init__(self, most_seconds: float) -> None:
        self._most_seconds = most_seconds
        self._most = most_seconds * 1000 * BYTES_A_MS
        self._pcm = bytearray()
        self._begin = 0
        """Bytes that came before those here."""

    @property
    def begin_ms(self) -> int:
        """Place of the first sample here."""
        return self._begin // BYTES_A_MS

    @property
    def end_ms(self) -> int:
        """Place after the last sample that came."""
        return (self._begin + len(self._pcm)) // BYTES_A_MS

    def __len__(self) -> int:
        """Bytes of sound here."""
        return len(self._pcm)

    def would_overflow(self, pcm_bytes: int) -> bool:
        """True if there is room for so many bytes, but not beside what waits."""
        return pcm_bytes <= self._most < len(self._pcm) + pcm_bytes

    def check_room(self, pcm_bytes: int) -> None:
        """Refuse sound that has no room.

        Raises:
            GatewayError: 400, with the limit.
        """
        if len(self._pcm) + pcm_bytes > self._most:
            said = f"The input audio buffer holds {self._most_seconds:g} s, its limit: commit or clear it, then append."
            raise bad_request(said, param="audio", code="input_audio_buffer_full")

    def append(self, pcm: bytes) -> None:
        """Add sound."""
        self._pcm += pcm

    def since(self, begin_ms: int) -> bytes:
        """The sound from a place on."""
        return bytes(self._pcm[max(0, begin_ms * BYTES_A_MS - self._begin) :])

    def forget_before(self, place_ms: int) -> None:
        """Drop what came before a place."""
        count = max(0, min(place_ms * BYTES_A_MS - self._begin, len(self._pcm)))
        del self._pcm[:count]
        self._begin += count

    def take(self, begin_ms: int, end_ms: int) -> bytes:
        """The sound between two places; what came before the second is dropped."""
        end = max(0, end_ms * BYTES_A_MS - self._begin)
        sound = bytes(self._pcm[max(0, begin_ms * BYTES_A_MS - self._begin) : end])
        self.forget_before(end_ms)
        return sound

    def clear(self) -> None:
        """Drop all."""
        self._begin += len(self._pcm)
        self._pcm.clear()
