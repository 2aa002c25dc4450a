# SPDX-License-Identifier: Apache-2.0
"""A medium's file: its type by its first bytes, and its opening with FFmpeg in bounded CPU time. Knows no codec.

FFmpeg compares each tag of a file with all others, so a megabyte of tags takes minutes; it has no option to skip them.
"""

from __future__ import annotations

import io
import signal
from collections.abc import Mapping
from typing import Literal

import av
from av.container import InputContainer

from triton_omni.core.settings import RequestLimits
from triton_omni.request.chat import MediaKind

FileType = Literal["wav", "flac", "ogg", "mp3", "aac", "amr", "png", "jpeg", "webp", "mp4", "webm"]

KINDS_OF: dict[FileType, tuple[MediaKind, ...]] = {
    "wav": ("audio",),
    "mp3": ("audio",),
    "flac": ("audio",),
    "ogg": ("audio",),
    "aac": ("audio",),
    "amr": ("audio",),
    "png": ("image",),
    "jpeg": ("image",),
    "webp": ("image",),
    "mp4": ("audio", "video"),
    "webm": ("audio", "video"),
}
"""Kinds of media that a file may be; a container with a video track is a video, and else a sound."""

_MAGIC: tuple[tuple[int, bytes, FileType], ...] = (
    (8, b"WAVE", "wav"),
    (8, b"WEBP", "webp"),
    (0, b"\x89PNG\r\n\x1a\n", "png"),
    (0, b"\xff\xd8\xff", "jpeg"),
    (0, b"fLaC", "flac"),
    (0, b"OggS", "ogg"),
    (0, b"#!AMR", "amr"),
    (4, b"ftyp", "mp4"),
    (0, b"\x1aE\xdf\xa3", "webm"),
)
_RIFF = (b"RIFF", b"RF64")
_TAG_HEADER = 10
_MOST_TAGS = 100
"""Maximum ID3 tags before a sound; an encoder writes one or two, and 64 MiB can hold six million."""


def sniff(data: bytes) -> FileType | None:
    """Return the type of a file by its first bytes, or by those after its ID3 tags; None = unknown."""
    start = after_tags(data)
    for place, expected, name in _MAGIC:
        if data.startswith(expected, start + place) and (place != 8 or data.startswith(_RIFF, start)):
            return name
    if len(data) < start + 2 or data[start] != 0xFF:
        return "mp3" if start else None
    # A frame header: 12 sync bits, one of MPEG's version, two of its layer. ADTS has layer 0, an mp3 layer III.
    if data[start + 1] & 0xF6 == 0xF0:
        return "aac"
    return "mp3" if data[start + 1] & 0xE6 == 0xE2 or start else None


def after_tags(data: bytes) -> int:
    """Return where a file's sound begins after its ID3 tags, of which at most `_MOST_TAGS` are skipped."""
    start = 0
    for _ in range(_MOST_TAGS):
        if not data.startswith(b"ID3", start) or len(data) < start + _TAG_HEADER:
            break
        size = 0
        for byte in data[start + 6 : start + _TAG_HEADER]:
            size = size << 7 | byte & 0x7F
        start += _TAG_HEADER + size
    return start


# --- FFmpeg -----------------------------------------------------------------------------------------------------------


_LEAST_S = 1.0
_SHARE = 16


def header_seconds(limits: RequestLimits) -> float:
    """CPU seconds that the header of one file may take."""
    return max(_LEAST_S, limits.max_decode_seconds / _SHARE)


def open_file(data: bytes, kind: str, limits: RequestLimits, options: Mapping[str, str]) -> InputContainer:
    """Open a file in memory by FFmpeg's demuxer `kind`; SIGPROF ends this process if the header takes too long.

    Raises:
        FFmpegError: the file cannot be read.
    """
    signal.setitimer(signal.ITIMER_PROF, header_seconds(limits))
    try:
        return av.open(io.BytesIO(data), mode="r", format=kind, metadata_errors="replace", options=dict(options))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
