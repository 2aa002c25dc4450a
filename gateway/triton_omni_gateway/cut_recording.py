# SPDX-License-Identifier: Apache-2.0
"""`python -I cut_recording.py SECONDS LIMIT CPU`: decodes the file on standard input, and writes it in windows.

A program of its own, since a file may stop, crash or take over what decodes it: it limits its own CPU time and memory,
and whoever starts it may kill it. It imports nothing of this package, which would take longer than to decode a minute.

Standard output gets records: a letter, the length of what follows (4 bytes, little-endian), and that. `w` is a window
as a WAV file; the last record is `e`, or `r` with the reason why the file is refused.
"""

from __future__ import annotations

import errno
import io
import resource
import struct
import sys
import wave
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import av
import numpy as np
from numpy.typing import NDArray

RATE: Final = 16_000
"""Samples a second of what is written: what the model hears."""
RECORD: Final = struct.Struct("<cI")
"""What each record begins with."""
FORMATS: Final = ("wav", "mp3", "ogg", "flac", "aac", "amr", "mov", "matroska", "mpeg")
"""FFmpeg's demuxers that are tried; others would open further files, by name or over a network."""
CODECS: Final = (
    *("aac", "ac3", "alac", "amrnb", "amrwb", "eac3", "flac", "mp2float", "mp3", "mp3float", "opus", "vorbis"),
    *("adpcm_ima_wav", "adpcm_ms", "gsm_ms", "pcm_alaw", "pcm_mulaw", "pcm_u8"),
    *(f"pcm_{kind}{end}" for kind in ("s16", "s24", "s32", "f32", "f64") for end in ("le", "be")),
)
"""FFmpeg's decoders that are used: those of the Triton server."""
LEAST_SECONDS: Final = 0.1
"""Shortest recording, and shortest window of one."""
_MEMORY_BYTES: Final = 256 << 20
"""Memory beside the file, which lies in memory that both processes share."""
_QUIET_SAMPLES: Final = RATE // 5
"""Length of the moment at which a window is cut: its quietest one. Words have shorter ones inside."""
_EARLIEST: Final = 2 / 3
"""Share of a window before which it is not cut."""

Samples = NDArray[np.int16]


class RefusedError(Exception):
    """The file is not taken; the text says why."""


def windows(blocks: Iterator[Samples], seconds: float, limit: float) -> Iterator[Samples]:
    """Join samples and cut them anew, each window at its quietest moment.

    Args:
        blocks: int16 [N] at `RATE`.
        seconds: longest window.
        limit: seconds of all together.

    Raises:
        RefusedError: there are under `LEAST_SECONDS` or over `limit` seconds.
    """
    longest, waiting, cut_off = round(seconds * RATE), 0, 0
    kept: list[Samples] = []
    for block in blocks:
        kept.append(block)
        waiting += len(block)
        if cut_off + waiting > limit * RATE:
            raise RefusedError(f"is longer than {limit:g} seconds, the limit of this gateway; send it in parts")
        while waiting > longest:
            joined = np.concatenate(kept)
            cut = quietest(joined[:longest])
            yield joined[:cut]
            kept, waiting, cut_off = [joined[cut:]], waiting - cut, cut_off + cut
    if cut_off + waiting < LEAST_SECONDS * RATE:
        raise RefusedError(f"has {waiting / RATE:g} seconds of sound; at least {LEAST_SECONDS:g} are needed")
    yield np.concatenate(kept)


def quietest(samples: Samples) -> int:
    """The middle of the quietest moment in the later part of a window."""
    begin = round(len(samples) * _EARLIEST)
    energy = np.concatenate(([0.0], np.cumsum(samples[begin:].astype(np.float64) ** 2)))
    moments = energy[_QUIET_SAMPLES:] - energy[:-_QUIET_SAMPLES]
    return begin + int(np.argmin(moments)) + _QUIET_SAMPLES // 2


def decoded(file: BinaryIO) -> Iterator[Samples]:
    """The first sound track of a file, mono at `RATE`.

    Raises:
        RefusedError: there is none that can be read.
    """
    whitelists = {"format_whitelist": ",".join(FORMATS), "codec_whitelist": ",".join(CODECS), "protocol_whitelist": ""}
    try:
        with av.open(file, mode="r", metadata_errors="replace", options=whitelists) as source:
            if not source.streams.audio:
                raise RefusedError("has no sound track")
            yield from _resampled(source)
    except (av.error.FFmpegError, ValueError) as error:
        if getattr(error, "errno", None) == errno.ENOMEM:
            raise MemoryError from error
        reason = getattr(error, "strerror", None) or error
        raise RefusedError(f"is no sound that can be read ({reason}); send {', '.join(FORMATS[:6])} or mp4") from error


def _resampled(source: Any) -> Iterator[Samples]:
    resampler = av.AudioResampler("s16", "mono", RATE)
    for frame in source.decode(audio=0):
        frame.pts = None  # else a gap between time stamps would end the decoding
        for part in resampler.resample(frame):
            yield part.to_ndarray()[0]
    for part in resampler.resample(None):
        yield part.to_ndarray()[0]


def as_wav(samples: Samples) -> bytes:
    """A WAV file of samples at `RATE`."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.tobytes())
    return out.getvalue()


def limit_this_process(cpu_seconds: int) -> None:
    """Let this process use so much CPU time and little memory, and leave nothing behind."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))  # SIGXCPU, which tells, then SIGKILL
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))


def main(seconds: float, limit: float, cpu_seconds: int) -> None:
    """Write the records of the file on standard input."""
    limit_this_process(cpu_seconds)

    def write(kind: bytes, content: bytes = b"") -> None:
        sys.stdout.buffer.write(RECORD.pack(kind, len(content)) + content)
        sys.stdout.buffer.flush()

    try:
        with open(0, "rb") as file:
            for window in windows(decoded(file), seconds, limit):
                write(b"w", as_wav(window))
        write(b"e")
    except RefusedError as error:
        write(b"r", str(error).encode())
    except MemoryError:
        write(b"r", b"needs more memory to decode than a recording may; encode it anew, for example as wav")


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
