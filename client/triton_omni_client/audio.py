# SPDX-License-Identifier: Apache-2.0
"""Waveforms as bytes and back: PCM16 chunks, WAV streams of unknown length, WAV files.

A waveform is float32 [S] in [-1, 1], mono, 24 kHz. Knows nothing of requests or servers.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from .closing import Closing
from .errors import Internal

SAMPLE_RATE = 24_000
"""Samples a second of every waveform that the server sends."""

Waveform = NDArray[np.float32]

_PCM_PEAK = np.float32(32_767)
_SAMPLE_BYTES = 2
_UNKNOWN_LENGTH = 0x7FFF_F000
"""The server's and sox's; RIFF has no length that means "until the end"."""
_UNKNOWN_LENGTHS = (0, _UNKNOWN_LENGTH, 0xFFFF_FFFF)
"""Those that are read so: the last is FFmpeg's."""
_HEADER = struct.Struct("<4sI4s4sIHHIIHH4sI")
_CHUNK = struct.Struct("<4sI")
_FORMAT = struct.Struct("<HHIIHH")
_LONGEST_HEADER = 1 << 16
_PCM_TAGS = (1, 0xFFFE)  # plain, and the "extensible" spelling of the same


def empty_waveform() -> Waveform:
    """A waveform of no samples."""
    return np.zeros(0, dtype=np.float32)


def pcm16_from_waveform(samples: Waveform) -> bytes:
    """Little-endian PCM16 of a waveform [S], clipped at full scale (32767).

    The same scale and rounding as the server's, so a reply saved here equals one that travelled as PCM16.
    """
    pcm: NDArray[np.int16] = np.rint(np.clip(samples, -1, 1) * _PCM_PEAK).astype("<i2")
    return pcm.tobytes()


def wav_header(num_samples: int | None, sample_rate: int = SAMPLE_RATE) -> bytes:
    """The 44 bytes before `num_samples` PCM16 samples; None = a stream whose length is not known yet."""
    data = _UNKNOWN_LENGTH if num_samples is None else num_samples * _SAMPLE_BYTES
    riff = data + _HEADER.size - _CHUNK.size
    byte_rate = sample_rate * _SAMPLE_BYTES
    return _HEADER.pack(
        b"RIFF", riff, b"WAVE", b"fmt ", 16, 1, 1, sample_rate, byte_rate, _SAMPLE_BYTES, 16, b"data", data
    )


class Pcm16Decoder:
    """PCM16 bytes, cut anywhere, to waveforms; a sample cut in two waits for its other half."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Waveform:
        """The samples that `data` completes."""
        data = self._rest + data
        whole = len(data) - len(data) % _SAMPLE_BYTES
        self._rest = data[whole:]
        samples = np.frombuffer(data[:whole], dtype="<i2").astype(np.float32)
        return np.maximum(samples / _PCM_PEAK, np.float32(-1))


class WavDecoder:
    """A WAV file, cut anywhere, to waveforms: the header may be of unknown length, as a stream's is.

    Raises:
        Internal: the bytes are no WAV file, or not PCM16, mono, 24 kHz.
    """

    def __init__(self) -> None:
        self._header = b""
        self._left: int | None = None
        self._in_data = False
        self._pcm = Pcm16Decoder()

    def feed(self, data: bytes) -> Waveform:
        """The samples that `data` completes; none until the header is whole."""
        if not self._in_data:
            self._header += data
            data = self._take_header()
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
        return self._pcm.feed(data)

    def _take_header(self) -> bytes:
        """Return the bytes after the header, or nothing while the header is incomplete."""
        header = self._header
        if not b"RIFF".startswith(header[:4]) or not b"WAVE".startswith(header[8:12]):
            raise Internal(f"expected a WAV file, the audio starts with {header[:12]!r}")
        at = 12
        while len(header) >= at + _CHUNK.size and at <= _LONGEST_HEADER:
            name, size = _CHUNK.unpack_from(header, at)
            at += _CHUNK.size
            if name == b"data":
                self._in_data, self._header = True, b""
                self._left = None if size in _UNKNOWN_LENGTHS else size
                return header[at:]
            if name == b"fmt " and len(header) >= at + _FORMAT.size:
                _check_format(*_FORMAT.unpack_from(header, at))
            at += size + size % 2
        if len(header) > _LONGEST_HEADER:
            raise Internal(f"the WAV file has no samples in its first {_LONGEST_HEADER} bytes")
        return b""


def _check_format(tag: int, channels: int, rate: int, _byte_rate: int, _align: int, bits: int) -> None:
    if tag not in _PCM_TAGS or (channels, rate, bits) != (1, SAMPLE_RATE, 16):
        raise Internal(
            f"expected PCM16, mono, {SAMPLE_RATE} Hz; the WAV header says format {tag}, {channels} channels, "
            f"{rate} Hz, {bits} bits"
        )


class WavWriter(Closing):
    """Writes a WAV file while its samples arrive; the lengths in the header are set on `close`.

    Where the file cannot seek (a pipe) the header says "unknown length", which players read to the end. After `close`
    the file is complete, even if writing was interrupted.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._seekable = file.seekable()
        self.num_samples = 0
        file.write(wav_header(0 if self._seekable else None))

    def write(self, samples: Waveform) -> None:
        """Append a waveform [S]."""
        self._file.write(pcm16_from_waveform(samples))
        self._file.flush()
        self.num_samples += len(samples)

    def close(self) -> None:
        """Write the final lengths; the file itself stays open."""
        if self._seekable:
            self._file.seek(0)
            self._file.write(wav_header(self.num_samples))
        self._file.flush()
