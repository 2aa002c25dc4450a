# SPDX-License-Identifier: Apache-2.0
"""Pictures to upright RGB of a size that the model takes, as the model card's recipe does (alpha over white).

Knows Pillow.
"""

from __future__ import annotations

import io
import logging
import re
import struct
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import UnidentifiedImageError

from triton_omni.core.errors import BadRequest, TooLarge
from triton_omni.core.settings import RequestLimits
from triton_omni.request.media.picture_parts import picture_parts
from triton_omni.request.media.types import Image, VisionSizes, smart_resize
from triton_omni.request.strict_json import shown

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
"""How a picture of each orientation is shown upright."""


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
    """EXIF's number of the orientation, 1 to 8; 1, upright, where it cannot be read."""
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
    """Pillow allocates an extended webp's whole canvas (up to 2**28 pixels) when it opens the file."""
    if data[8:16] == b"WEBPVP8X" and len(data) >= 30:
        width = 1 + int.from_bytes(data[24:27], "little")
        height = 1 + int.from_bytes(data[27:30], "little")
        _check_pixels(width, height, limits)


def _on_white(image: Pillow.Image, transparency: object) -> Pillow.Image:
    """RGB, transparent places white; `transparency` is a picture's transparent colour, if it has one."""
    if image.mode.startswith("I"):
        return _of_16_bits(np.asarray(image), transparency)
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    ground = Pillow.new("RGB", layer.size, (255, 255, 255))
    ground.paste(layer, mask=layer.getchannel("A"))
    return ground


def _of_16_bits(gray: NDArray[np.integer[Any]], transparency: object) -> Pillow.Image:
    """RGB of gray in 16 bits [H, W], which Pillow would clip to 8."""
    scaled = (gray.astype(np.uint32) * 255 + 32767) // 65535
    if isinstance(transparency, int):
        scaled[gray == transparency] = 255
    return Pillow.fromarray(scaled.astype(np.uint8)).convert("RGB")
