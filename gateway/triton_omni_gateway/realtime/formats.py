# SPDX-License-Identifier: Apache-2.0
"""Sound of a session to what the model and the detectors hear, PCM16 at 16 kHz, and a reply's to what the client asked.

FFmpeg's codecs and resampler do the work, through PyAV.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

import av
import numpy as np
from av.audio.codeccontext import AudioCodecContext

from triton_omni_client.audio import SAMPLE_RATE, Waveform, pcm16_from_waveform, wav_header
from triton_omni_client.listening import HEARD_RATE
from triton_omni_gateway.sound import Tempo

from .config import PcmFormat, SoundFormat

BYTES_A_MS: Final = HEARD_RATE * 2 // 1000
"""Bytes of a millisecond that is heard."""
SHORTEST_MS: Final = 100
"""Of sound that becomes an item, as at OpenAI."""
_G711_RATE = 8000
_CODECS: Final[dict[str, Literal["pcm_mulaw", "pcm_alaw"]]] = {"audio/pcmu": "pcm_mulaw", "audio/pcma": "pcm_alaw"}


def heard_wav(pcm: bytes) -> bytes:
    """Return PCM16 of the user's speech as a WAV file."""
    return wav_header(len(pcm) // 2, HEARD_RATE) + pcm


def encoded_input(pcm: bytes, sound_format: SoundFormat) -> bytes:
    """Return PCM16 of the user's speech in the format of a session."""
    encoder = _PcmEncoder(HEARD_RATE, sound_format)
    return encoder.feed(pcm) + encoder.end()


class InputDecoder:
    """Sound of one format, cut anywhere, to PCM16 at 16 kHz."""

    def __init__(self, sound_format: SoundFormat) -> None:
        self._decoder = None if isinstance(sound_format, PcmFormat) else _codec(sound_format.type, "r")
        self._rate = sound_format.rate
        self._resampler = self._new_resampler()
        self._rest = b""

    def _new_resampler(self) -> av.AudioResampler | None:
        return None if self._rate == HEARD_RATE else av.AudioResampler("s16", "mono", HEARD_RATE)

    def decode(self, data: bytes) -> bytes:
        """Return what is heard of the next bytes; a sample cut in two waits, and a resampler keeps a moment back."""
        return self._resampled(self._decoded(data))

    def end(self) -> bytes:
        """Return what was kept back; what comes next is another sound."""
        kept = b"" if self._resampler is None else _bytes(self._resampler.resample(None))
        self._resampler, self._rest = self._new_resampler(), b""
        return kept

    def _decoded(self, data: bytes) -> bytes:
        if self._decoder is not None:
            return _bytes(self._decoder.decode(av.Packet(data))) if data else b""
        data = self._rest + data
        whole = len(data) - len(data) % 2
        self._rest = data[whole:]
        return data[:whole]

    def _resampled(self, pcm: bytes) -> bytes:
        if self._resampler is None or not pcm:
            return pcm
        return _bytes(self._resampler.resample(_frame(pcm, self._rate)))


class OutputEncoder:
    """Waveforms of one reply, float32 [S] at 24 kHz, to bytes of whole samples.

    Args:
        sound_format: of the bytes.
        speed: of the speech.
    """

    def __init__(self, sound_format: SoundFormat, speed: float = 1.0) -> None:
        self._tempo = None if speed == 1 else Tempo(speed)
        self._samples = 0
        self._encoder = _PcmEncoder(SAMPLE_RATE, sound_format)

    @property
    def seconds(self) -> float:
        """How much speech was said."""
        return self._samples / SAMPLE_RATE

    def encode(self, samples: Waveform) -> bytes:
        """Return the next bytes; a speed and a resampler keep a moment back."""
        return self._encoded(samples if self._tempo is None else self._tempo.feed(samples))

    def end(self) -> bytes:
        """Return what was kept back."""
        last = b"" if self._tempo is None else self._encoded(self._tempo.end())
        return last + self._encoder.end()

    def _encoded(self, samples: Waveform) -> bytes:
        self._samples += len(samples)
        return self._encoder.feed(pcm16_from_waveform(samples))


class _PcmEncoder:
    """PCM16 of one rate to bytes of a format."""

    def __init__(self, rate: int, sound_format: SoundFormat) -> None:
        self._rate = rate
        self._codec = None if isinstance(sound_format, PcmFormat) else _codec(sound_format.type, "w")
        self._resampler = None if rate == sound_format.rate else av.AudioResampler("s16", "mono", sound_format.rate)

    def feed(self, pcm: bytes) -> bytes:
        """Return the next bytes; a resampler keeps a moment back."""
        if self._resampler is None or not pcm:
            return pcm
        return self._encoded(self._resampler.resample(_frame(pcm, self._rate)))

    def end(self) -> bytes:
        """Return what was kept back."""
        return b"" if self._resampler is None else self._encoded(self._resampler.resample(None))

    def _encoded(self, frames: Iterable[av.AudioFrame]) -> bytes:
        if self._codec is None:
            return _bytes(frames)
        return b"".join(bytes(packet) for frame in frames if frame.samples for packet in self._codec.encode(frame))


def _codec(kind: str, mode: Literal["r", "w"]) -> AudioCodecContext:
    made: AudioCodecContext = av.CodecContext.create(_CODECS[kind], mode)
    made.sample_rate = _G711_RATE
    made.layout = "mono"
    if mode == "w":
        made.format = "s16"
    return made


def _frame(pcm: bytes, rate: int) -> av.AudioFrame:
    frame = av.AudioFrame.from_ndarray(np.frombuffer(pcm, "<i2")[None], format="s16", layout="mono")
    frame.sample_rate = rate
    return frame


def _bytes(frames: Iterable[av.AudioFrame]) -> bytes:
    return b"".join(frame.to_ndarray()[0].tobytes() for frame in frames if frame.samples)
