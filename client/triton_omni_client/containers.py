# SPDX-License-Identifier: Apache-2.0
"""Detects pictures in containers that may hold sound alone (MP4, Matroska and WebM).

It reads the lists of tracks, and nothing of what they hold.
"""

from __future__ import annotations

from collections.abc import Iterator

_MP4_PICTURES, _MP4_SOUND = b"vide", b"soun"
"""Handler types of tracks."""
_MP4_TRACKS = (b"moov", b"trak", b"mdia", b"hdlr")
_SEGMENT, _TRACKS, _TRACK, _TRACK_TYPE = 0x18538067, 0x1654AE6B, 0xAE, 0x83
"""Elements of Matroska, each in the one before."""
_MATROSKA_PICTURES, _MATROSKA_SOUND = b"\x01", b"\x02"

_Span = tuple[int, int]
"""Where something begins in the file, and where it ends."""


def is_sound_alone(data: bytes) -> bool:
    """True if an MP4 or Matroska file has sound and no pictures; False where its tracks cannot be found."""
    found = set(_mp4_tracks(data) if data[4:8] == b"ftyp" else _matroska_tracks(data))
    return bool(found & {_MP4_SOUND, _MATROSKA_SOUND}) and not found & {_MP4_PICTURES, _MATROSKA_PICTURES}


def _mp4_tracks(data: bytes) -> Iterator[bytes]:
    spans = [(0, len(data))]
    for name in _MP4_TRACKS:
        spans = [inner for span in spans for inner in _boxes(data, span, name)]
    for begin, _ in spans:
        # A version and a word that is not used come first.
        yield data[begin + 8 : begin + 12]


def _boxes(data: bytes, span: _Span, wanted: bytes) -> Iterator[_Span]:
    """The contents of the boxes of this name that are directly in `span`."""
    at, end = span
    while at + 8 <= end:
        size, name, head = int.from_bytes(data[at : at + 4]), data[at + 4 : at + 8], 8
        if size == 1:
            size, head = int.from_bytes(data[at + 8 : at + 16]), 16
        after = min(at + size, end) if size else end
        if after < at + head:
            return
        if name == wanted:
            yield at + head, after
        at = after


def _matroska_tracks(data: bytes) -> Iterator[bytes]:
    spans = [(0, len(data))]
    for name in (_SEGMENT, _TRACKS, _TRACK, _TRACK_TYPE):
        spans = [inner for span in spans for inner in _elements(data, span, name)]
    for begin, end in spans:
        yield data[begin:end][-1:]


def _elements(data: bytes, span: _Span, wanted: int) -> Iterator[_Span]:
    """The contents of the elements of this name that are directly in `span`."""
    at, end = span
    while at < end:
        name, at = _number(data, at)
        size, begin = _number(data, at)
        length = begin - at
        if not name or not length:
            return
        size -= 1 << 7 * length
        # All ones say that nobody knew it, as in a recording that was sent while it was made.
        at = end if size == (1 << 7 * length) - 1 else min(begin + size, end)
        if name == wanted:
            yield begin, at


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A number of EBML with the bit that tells its length, and where it ends; (0, `at`) where there is none."""
    length = 9 - data[at].bit_length() if at < len(data) else 9
    if length > 8 or at + length > len(data):
        return 0, at
    return int.from_bytes(data[at : at + length]), at + length
