# SPDX-License-Identifier: Apache-2.0
"""Finds the parts of an image file that are the image; they are counted and sorted before a library reads them.

Libraries read, join and unpack much that no viewer shows, and some of it takes time by the square of its length. Here
a file is walked once, in linear time; metadata but for the orientation, and what lies after the picture, are left out.
Knows the outermost structure of the formats, no codec.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from triton_omni.core.errors import BadRequest

MAX_PARTS: Final = 1 << 16
"""Segments of a jpeg, or chunks of a png: 64 MiB in parts of a kilobyte."""
MAX_SCANS: Final = 100
"""Maximum scans of a progressive jpeg: each passes over the whole image and can be 30 bytes long. Encoders write about
ten.
"""

_MARKER: Final = re.compile(rb"\xff[^\x00\xff]")
_AFTER_SCAN: Final = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
"""Within a scan, restart markers and escaped bytes are of the picture."""
_END, _SCAN, _APP1, _COMMENT = 0xD9, 0xDA, 0xE1, 0xFE
_APPLICATION: Final = range(0xE0, 0xF0)
_COLOURS: Final = (0xE0, 0xEE)
"""JFIF's and Adobe's segments say which colours the picture has."""
_WITHOUT_LENGTH: Final = (0x01, 0xD8, *range(0xD0, 0xD8))
_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
_PNG_HEAD: Final = b"\x89PNG\r\n\x1a\n"
_PNG_PICTURE: Final = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"))


@dataclass(frozen=True)
class PictureParts:
    """A picture alone, and what its file says of its orientation."""

    picture: bytes = field(repr=False)
    exif: bytes | None = None
    """EXIF block, as in a jpeg or from its byte order on."""
    xmp: bytes | None = None


def picture_parts(data: bytes) -> PictureParts:
    """The parts of a jpeg, a png or a webp file; what cannot be followed is left for the codec to judge.

    Raises:
        BadRequest: more parts, or more scans, than any encoder writes.
    """
    if data[:2] == b"\xff\xd8":
        return _jpeg(data)
    if data[:8] == _PNG_HEAD:
        return _png(data)
    if data[:4] == b"RIFF":
        return PictureParts(data[: 8 + int.from_bytes(data[4:8], "little")])
    return PictureParts(data)


def _jpeg(data: bytes) -> PictureParts:
    kept, told = [data[:2]], dict[bytes, bytes]()
    position, parts, scans = 2, 0, 0
    while found := _MARKER.search(data, position):
        start, code = found.start(), data[found.start() + 1]
        position = found.end()
        if code == _END:
            kept.append(data[start:position])
            break
        if code in _WITHOUT_LENGTH:
            continue
        parts += 1
        _check_number(parts, "segments of a jpeg", MAX_PARTS)
        end = position + int.from_bytes(data[position : position + 2])
        if code == _SCAN:
            scans += 1
            _check_number(scans, "scans of a jpeg", MAX_SCANS)
            after = _AFTER_SCAN.search(data, end)
            end = after.start() if after else len(data)
        if code == _APP1:
            _keep_told(data[position + 2 : end], told)
        elif code in _COLOURS or code not in (*_APPLICATION, _COMMENT):
            kept.append(data[start:end])
        position = end
    return PictureParts(b"".join(kept), told.get(_EXIF), told.get(_XMP))


def _keep_told(body: bytes, told: dict[bytes, bytes]) -> None:
    """Keep the first segment of each kind: it has the orientation."""
    for name in (_EXIF, _XMP):
        if body.startswith(name):
            told.setdefault(name, body)


def _png(data: bytes) -> PictureParts:
    kept, exif = [_PNG_HEAD], None
    position, parts = len(_PNG_HEAD), 0
    while position + 8 <= len(data):
        parts += 1
        _check_number(parts, "chunks of a png", MAX_PARTS)
        name = data[position + 4 : position + 8]
        end = position + 12 + int.from_bytes(data[position : position + 4])
        # Any other chunk is critical and unknown to decoders, or no chunk at all.
        if name in _PNG_PICTURE or not name[:1].islower():
            kept.append(data[position:end])
        elif name == b"eXIf" and exif is None:
            exif = data[position + 8 : end - 4]
        if name == b"IEND":
            break
        position = end
    return PictureParts(b"".join(kept), exif)


def _check_number(number: int, what: str, limit: int) -> None:
    if number > limit:
        raise BadRequest(f"over {limit} {what}, which is the limit; save the picture anew")
