# SPDX-License-Identifier: Apache-2.0
"""Waveforms to what a caller hears: raw, WAV or compressed, chunk by chunk or whole. Knows no JSON and no HTTP.

FFmpeg's encoders, containers and its filter `atempo` do the work, through PyAV.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Final, Literal, NamedTuple

import av
import numpy as np
from av.filter import Graph
from numpy.typing import NDArray

from triton_omni_client.audio import SAMPLE_RATE, Waveform, pcm16_from_waveform, wav_header

SoundFormat = Literal["wav", "pcm16", "mp3", "opus", "aac", "flac"]
SLOWEST, FASTEST = 0.25, 4.0
"""Range of a speed, OpenAI's."""
_PLAIN_TEMPO = (0.5, 2.0)
"""Speeds that one `atempo` makes well; two share others."""


class _Coding(NamedTuple):
    """How FFmpeg makes a format."""

    container: str
    codec: Literal["libmp3lame", "libopus", "aac", "flac"]
    bits_per_second: int | None
    options: Mapping[str, str] = {}
    """Of the container."""


_CODINGS: Final[Mapping[str, _Coding]] = {
    # Without the headers that tell a length, which a stream does not know.
    "mp3": _Coding("mp3", "libmp3lame", 96_000, {"write_xing": "0", "id3v2_version": "0"}),
    # A page would otherwise wait for a second of sound.
    "opus": _Coding("ogg", "libopus", 48_000, {"page_duration": "100000"}),
    "aac": _Coding("adts", "aac", 96_000),
    "flac": _Coding("flac", "flac", None),
}
MEDIA_TYPES: Final[Mapping[SoundFormat, str]] = {
    "wav": "audio/wav",
    "pcm16": "audio/pcm",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
}


class _Bytes:
    """The file that a container is written to. It cannot seek, so a container goes without what it knows at its end."""

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, data: bytes) -> int:
        """Append bytes."""
        self._data += data
        return len(data)

    def take(self) -> bytes:
        """Return what was written since the last call."""
        data, self._data = bytes(self._data), bytearray()
        return data


class _Compressed:
    """Samples to a compressed sound in its container."""

    def __init__(self, coding: _Coding) -> None:
        self._file = _Bytes()
        # Each packet at once: FFmpeg would gather 32 KiB, which is seconds of sound.
        options = {**coding.options, "flush_packets": "1"}
        self._container = av.open(self._file, "w", format=coding.container, options=options)
        self._stream = self._container.add_stream(coding.codec, rate=SAMPLE_RATE, layout="mono")
        if coding.bits_per_second is not None:
            self._stream.bit_rate = coding.bits_per_second
        self._samples = 0

    def feed(self, samples: Waveform) -> bytes:
        """Encode samples; an encoder keeps some back."""
        if len(samples):
            pcm = np.frombuffer(pcm16_from_waveform(samples), np.int16)
            self._container.mux(self._stream.encode(_frame(pcm[None], "s16", self._samples)))
            self._samples += len(samples)
        return self._file.take()

    def end(self) -> bytes:
        """Encode what was kept back, and end the container."""
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._file.take()


class _Raw:
    """PCM16 after a header."""

    def __init__(self, header: bytes) -> None:
        self._header = header

    def feed(self, samples: Waveform) -> bytes:
        """Return the header before the first samples, and the samples."""
        header, self._header = self._header, b""
        return header + pcm16_from_waveform(samples)

    def end(self) -> bytes:
        """Return the header where no samples came."""
        header, self._header = self._header, b""
        return header


class Tempo:
    """Speech at another speed and the same pitch, by FFmpeg's `atempo`: WSOLA (Verhelst and Roelands, 1993)."""

    def __init__(self, speed: float) -> None:
        self._graph, self._samples = Graph(), 0
        self._graph.threads = 1
        node = self._source = self._graph.add_abuffer(
            sample_rate=SAMPLE_RATE, format="flt", layout="mono", time_base=Fraction(1, SAMPLE_RATE)
        )
        low, high = _PLAIN_TEMPO
        factors = [speed] if low <= speed <= high else [math.sqrt(speed)] * 2
        for name, value in [*(("atempo", f"{factor:.6f}") for factor in factors), ("abuffersink", None)]:
            after = self._graph.add(name, value)
            node.link_to(after)
            node = after
        self._sink = node
        self._graph.configure()

    def feed(self, samples: Waveform) -> Waveform:
        """Return the samples that are due; the filter keeps some back."""
        if len(samples):
            self._source.push(_frame(np.ascontiguousarray(samples[None]), "flt", self._samples))
            self._samples += len(samples)
        return self._due()

    def end(self) -> Waveform:
        """Return what was kept back."""
        self._source.push(None)
        return self._due()

    def _due(self) -> Waveform:
        parts = [frame.to_ndarray()[0] for frame in self._frames()]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def _frames(self) -> Iterator[av.AudioFrame]:
        while True:
            try:
                frame = self._sink.pull()
            except (av.error.BlockingIOError, av.error.EOFError):
                return
            if isinstance(frame, av.AudioFrame):
                yield frame


def _frame(samples: NDArray[Any], sample_format: str, begin: int) -> av.AudioFrame:
    frame = av.AudioFrame.from_ndarray(samples, format=sample_format, layout="mono")
    frame.sample_rate, frame.pts, frame.time_base = SAMPLE_RATE, begin, Fraction(1, SAMPLE_RATE)
    return frame


class SoundEncoder:
    """Waveforms of one reply, float32 [S] at 24 kHz, to bytes whose concatenation is one sound.

    `pcm16` is little-endian, mono, 24 kHz. A streamed `wav` begins with a header of unknown length.
    Every piece but the last is a multiple of three bytes, so that their joined base64 is base64 of the sound.

    Args:
        sound_format: of the bytes.
        speed: of the speech, `SLOWEST` to `FASTEST`.
    """

    def __init__(self, sound_format: SoundFormat, speed: float = 1.0) -> None:
        coding = _CODINGS.get(sound_format)
        header = wav_header(None) if sound_format == "wav" else b""
        self._coder = _Raw(header) if coding is None else _Compressed(coding)
        self._tempo = None if speed == 1 else Tempo(speed)
        self._rest = b""

    def feed(self, samples: Waveform) -> bytes:
        """The next bytes, one or two less than what is there; a compressed format or a speed keeps more back."""
        data = self._rest + self._coder.feed(samples if self._tempo is None else self._tempo.feed(samples))
        cut = len(data) - len(data) % 3
        self._rest = data[cut:]
        return data[:cut]

    def end(self) -> bytes:
        """The bytes still owed at the end."""
        last = b"" if self._tempo is None else self._coder.feed(self._tempo.end())
        rest, self._rest = self._rest + last + self._coder.end(), b""
        return rest


def encode_whole(sound_format: SoundFormat, samples: Waveform) -> bytes:
    """A complete file, or all samples (`pcm16`)."""
    if sound_format == "wav":
        return wav_header(len(samples)) + pcm16_from_waveform(samples)
    encoder = SoundEncoder(sound_format)
    return encoder.feed(samples) + encoder.end()
