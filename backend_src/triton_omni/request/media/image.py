# SPDX-License-Identifier: Apache-2.0
"""Pictures to upright RGB of a size that the model takes, as the model card's recipe does (alpha over white).

Libraries read, join and unpack parts that no viewer shows, some of them in quadratic time. So a file is scanned once
before, in linear time. The parts of the picture are counted and sorted; metadata other than the orientation, and data
after the picture, are left out. Knows Pillow and the outermost structure of the formats.
"""

from __future__ import annotations

import io
import logging
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import UnidentifiedImageError

from triton_omni.core.errors import BadRequest, TooLarge
from triton_omni.core.settings import RequestLimits
from triton_omni.request.media.types import Image, VisionSizes, smart_resize
from triton_omni.request.strict_json import shown

# --- parts of a file --------------------------------------------------------------------------------------------------


MAX_PARTS: Final = 1 << 16
"""Segments of a jpeg, or chunks of a png: 64 MiB in parts of a kilobyte."""
MAX_SCANS: Final = 100
"""Maximum scans of a progressive jpeg: each passes over the whole image and can be 30 bytes long. Encoders write about
ten.
"""

_MARKER: Final = re.compile(rb"\xff[^\x00\xff]")
_AFTER_SCAN: Final = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
"""End of a scan; restart markers and escaped bytes belong to the scan."""
_END, _SCAN, _APP1, _COMMENT = 0xD9, 0xDA, 0xE1, 0xFE
_APPLICATION: Final = range(0xE0, 0xF0)
_COLOURS: Final = (0xE0, 0xEE)
"""JFIF's and Adobe's segments, which state the picture's colour space."""
_WITHOUT_LENGTH: Final = (0x01, 0xD8, *range(0xD0, 0xD8))
_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
_PNG_HEAD: Final = b"\x89PNG\r\n\x1a\n"
_PNG_PICTURE: Final = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"))


@dataclass(frozen=True)
class PictureParts:
    """A picture without other data, and its file's blocks with the orientation."""

    picture: bytes = field(repr=False)
    exif: bytes | None = None
    """EXIF block, as in a jpeg or from its byte order on."""
    xmp: bytes | None = None


def picture_parts(data: bytes) -> PictureParts:
    """Return the parts of a jpeg, png or webp file; the codec judges files whose structure is broken.

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


# --- the picture ------------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

FORMATS = ("PNG", "JPEG", "WEBP")
_ORIENTATION: Final = 0x0112
_XMP_ORIENTATION: Final = re.compile(rb'tiff:Orientation(?:="|>)([1-8])')
_TRANSPOSE: Final[Mapping[int, Pillow.Transpose]] = {
    2: Pillow.Transpose.FLIP_LEFT_RIGHT,
    3: Pillow.Transpose.ROTATE_180,
    4: Pillow.Transpose.FLIP_TOP_BOTTOM,
    5: Pillow.Transpose.TRANSPOSE,
    6: Pillow.Transpose.ROTATE_270,
    7: Pillow.Transpose.TRANSVERSE,
    8: Pillow.Transpose.ROTATE_90,
}
"""Transposition that shows a picture of each orientation upright."""


def decode_image(data: bytes, limits: RequestLimits, sizes: VisionSizes) -> Image:
    """Decode a png, jpeg or webp file; of an animation the first frame.

    Raises:
        BadRequest: unreadable or truncated, of more parts than encoders write, or one side over 200 times the other.
        TooLarge: the header names more pixels than `limits.max_image_pixels`.
    """
    _check_webp_canvas(data, limits)
    parts = picture_parts(data)
    try:
        opened = Pillow.open(io.BytesIO(parts.picture), formats=FORMATS)
        _check_pixels(opened.width, opened.height, limits)
        way = _TRANSPOSE.get(_orientation(parts.exif or opened.info.get("exif"), parts.xmp))
        shown_as = opened if way is None else opened.transpose(way)
        height, width = smart_resize(shown_as.height, shown_as.width, sizes.factor, sizes.image)
        image = _on_white(shown_as, opened.info.get("transparency"))
    except (Pillow.DecompressionBombError, Pillow.DecompressionBombWarning) as error:
        raise TooLarge(f"the limit is {limits.max_image_pixels} pixels: {error}") from error
    except UnidentifiedImageError as error:  # its text names the object that the file was read from
        raise BadRequest("unreadable image: damaged at its beginning") from error
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error) as error:  # Pillow's ways to fail
        raise BadRequest(f"unreadable image: {shown(str(error))}") from error
    return Image(image.resize((width, height)))


def _orientation(exif: bytes | None, xmp: bytes | None) -> int:
    """Return EXIF's number of the orientation, 1 to 8; 1 (upright) if it cannot be read."""
    found = _XMP_ORIENTATION.search(xmp or b"")
    said: object = int(found[1]) if found else 1
    try:
        block = Pillow.Exif()
        block.load(exif or b"")
        said = block.get(_ORIENTATION, said)
    except (OSError, SyntaxError, ValueError, TypeError, LookupError, OverflowError, struct.error) as error:
        logger.debug("a damaged EXIF block is left out: %s", error)
    return said if isinstance(said, int) else 1


def _check_pixels(width: int, height: int, limits: RequestLimits) -> None:
    if width * height > limits.max_image_pixels:
        raise TooLarge(f"{width} x {height} pixels, the limit is {limits.max_image_pixels} in all")


def _check_webp_canvas(data: bytes, limits: RequestLimits) -> None:
    """Check an extended webp's canvas, which Pillow allocates whole (up to 2**28 pixels) when it opens the file."""
    if data[8:16] == b"WEBPVP8X" and len(data) >= 30:
        width = 1 + int.from_bytes(data[24:27], "little")
        height = 1 + int.from_bytes(data[27:30], "little")
        _check_pixels(width, height, limits)


def _on_white(image: Pillow.Image, transparency: object) -> Pillow.Image:
    """Return RGB with transparent places white; `transparency` is the picture's transparent colour, if it has one."""
    if image.mode.startswith("I"):
        return _of_16_bits(np.asarray(image), transparency)
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    ground = Pillow.new("RGB", layer.size, (255, 255, 255))
    ground.paste(layer, mask=layer.getchannel("A"))
    return ground


def _of_16_bits(gray: NDArray[np.integer[Any]], transparency: object) -> Pillow.Image:
    """Return RGB of 16-bit gray [H, W], which Pillow would clip to 8 bits."""
    scaled = (gray.astype(np.uint32) * 255 + 32767) // 65535
    if isinstance(transparency, int):
        scaled[gray == transparency] = 255
    return Pillow.fromarray(scaled.astype(np.uint8)).convert("RGB")
