# SPDX-License-Identifier: Apache-2.0
"""Pictures to upright RGB of a size that the model takes, as the model card's recipe does (alpha over white).

Knows Pillow.
"""

from __future__ import annotations

import io
import struct

from PIL import Image as Pillow
from PIL import ImageOps, UnidentifiedImageError

from triton_omni.errors import BadRequest, TooLarge
from triton_omni.media.types import Image, VisionSizes, smart_resize
from triton_omni.settings import RequestLimits
from triton_omni.strict_json import shown

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_SCANS = 100
"""Of a progressive jpeg: each passes over the whole picture and can be 30 bytes long. Encoders write about ten."""
MAX_PROFILES = 8
"""Colour profiles of a png, each of which is unpacked; honest files have one, and compressed pixels may spell more."""


def decode_image(data: bytes, limits: RequestLimits, sizes: VisionSizes) -> Image:
    """Decode a png, jpeg or webp file; of an animation the first frame.

    Raises:
        BadRequest: unreadable or truncated, or one side over 200 times the other.
        TooLarge: the header names more pixels than `limits.max_image_pixels`.
    """
    _check_webp_canvas(data, limits)
    _check_repeats(data)
    try:
        opened = Pillow.open(io.BytesIO(data), formats=FORMATS)
        _check_pixels(opened.width, opened.height, limits)
        height, width = _target(opened, sizes)
        image = _on_white(ImageOps.exif_transpose(opened))
    except (Pillow.DecompressionBombError, Pillow.DecompressionBombWarning) as error:
        raise TooLarge(f"the limit is {limits.max_image_pixels} pixels: {error}") from error
    except UnidentifiedImageError as error:  # its text names the object that the file was read from
        raise BadRequest("unreadable image: damaged at its beginning") from error
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error) as error:  # Pillow's ways to fail
        raise BadRequest(f"unreadable image: {shown(str(error))}") from error
    return Image(image.resize((width, height)))


def _target(opened: Pillow.Image, sizes: VisionSizes) -> tuple[int, int]:
    turned = opened.getexif().get(0x0112, 1) in (5, 6, 7, 8)  # EXIF orientations that swap the sides
    width, height = opened.size[::-1] if turned else opened.size
    return smart_resize(height, width, sizes.factor, sizes.image)


def _check_pixels(width: int, height: int, limits: RequestLimits) -> None:
    if width * height > limits.max_image_pixels:
        raise TooLarge(f"{width} x {height} pixels, the limit is {limits.max_image_pixels} in all")


def _check_webp_canvas(data: bytes, limits: RequestLimits) -> None:
    """Pillow allocates an extended webp's whole canvas (up to 2**28 pixels) when it opens the file."""
    if data[8:16] == b"WEBPVP8X" and len(data) >= 30:
        width = 1 + int.from_bytes(data[24:27], "little")
        height = 1 + int.from_bytes(data[27:30], "little")
        _check_pixels(width, height, limits)


def _check_repeats(data: bytes) -> None:
    """Refuse what makes Pillow do the same work again and again."""
    if data[:2] == b"\xff\xd8" and (scans := data.count(b"\xff\xda")) > MAX_SCANS:
        raise BadRequest(f"a jpeg of {scans} scans, at most {MAX_SCANS} are allowed")
    if data[:4] == b"\x89PNG" and (profiles := data.count(b"iCCP")) > MAX_PROFILES:
        raise BadRequest(f"a png of {profiles} colour profiles, at most {MAX_PROFILES} are allowed")


def _on_white(image: Pillow.Image) -> Pillow.Image:
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    ground = Pillow.new("RGB", layer.size, (255, 255, 255))
    ground.paste(layer, mask=layer.getchannel("A"))
    return ground
