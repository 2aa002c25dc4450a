# SPDX-License-Identifier: Apache-2.0
"""Detects file types by their first bytes, as the server does; by their name only where the bytes say nothing.

Knows no codec: what is inside a file is the server's to find out.
"""

from __future__ import annotations

import mimetypes
from pathlib import Path
from typing import get_args

from .containers import is_sound_alone
from .errors import BadRequest
from .messages import Media, MediaKind

_MAGIC: tuple[tuple[int, bytes, MediaKind], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", "image"),
    (0, b"\xff\xd8\xff", "image"),
    (8, b"WEBP", "image"),
    (8, b"WAVE", "audio"),
    (0, b"fLaC", "audio"),
    (0, b"OggS", "audio"),
    (0, b"ID3", "audio"),
    (0, b"#!AMR", "audio"),
    (4, b"ftyp", "video"),
    (0, b"\x1aE\xdf\xa3", "video"),  # Matroska: webm
)


def media_kind(data: bytes, name: str = "") -> MediaKind:
    """Return the kind of a file: image, sound or video; an mp4 or a webm without a video track is a sound.

    Args:
        data: the file; its first 12 bytes tell all but a video's kind of file that has sound alone, as a voice memo's.
        name: its name, for a content that is not known here.

    Raises:
        BadRequest: neither content nor name says it, or it is empty.
    """
    if not data:
        raise BadRequest(f"{name or 'the data'}: is empty")
    for at, expected, kind in _MAGIC:
        if data[at : at + len(expected)] == expected:
            return "audio" if kind == "video" and is_sound_alone(data) else kind
    # An MPEG frame header of layer III, or ADTS.
    if len(data) > 1 and data[0] == 0xFF and (data[1] & 0xE6 == 0xE2 or data[1] & 0xF6 == 0xF0):
        return "audio"
    said = (mimetypes.guess_type(name)[0] or "").partition("/")[0]
    for kind in get_args(MediaKind):
        if said == kind:
            found: MediaKind = kind
            return found
    raise BadRequest(f"{name or 'the data'}: neither an image nor a sound nor a video, by content and by name")


def load_media(path: str | Path) -> Media:
    """Read a file, of whatever kind it is.

    Raises:
        BadRequest: the file cannot be read, or is no medium.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise BadRequest(f"{path}: cannot be read: {error.strerror}") from error
    return Media(media_kind(data, Path(path).name), data, str(path))
