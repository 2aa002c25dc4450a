# SPDX-License-Identifier: Apache-2.0
"""Waveforms to what a caller hears: PCM16 or WAV, chunk by chunk or whole. Knows no JSON and no HTTP."""

from __future__ import annotations

from typing import Literal

from triton_omni_client.audio import Waveform, pcm16_from_waveform, wav_header

SoundFormat = Literal["wav", "pcm16"]


class SoundEncoder:
    """Waveforms of one reply, float32 [S] at 24 kHz, to bytes whose concatenation is one sound.

    `pcm16` is little-endian, mono, 24 kHz. A streamed `wav` begins with a header of unknown length.
    Every piece but the last is a multiple of three bytes, so that their joined base64 is base64 of the sound.
    """

    def __init__(self, sound_format: SoundFormat) -> None:
        self._rest = wav_header(None) if sound_format == "wav" else b""

    def feed(self, samples: Waveform) -> bytes:
        """The next bytes: the header before the first samples, one or two bytes less than what is there."""
        data = self._rest + pcm16_from_waveform(samples)
        cut = len(data) - len(data) % 3
        self._rest = data[cut:]
        return data[:cut]

    def end(self) -> bytes:
        """The bytes still owed at the end."""
        rest, self._rest = self._rest, b""
        return rest


def encode_whole(sound_format: SoundFormat, samples: Waveform) -> bytes:
    """A complete file (`wav`) or all samples (`pcm16`)."""
    header = wav_header(len(samples)) if sound_format == "wav" else b""
    return header + pcm16_from_waveform(samples)
