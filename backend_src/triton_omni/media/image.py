# SPDX-License-Identifier: Apache-2.0
"""Pictures to upright RGB of a size that the model takes, as the model card's recipe does (alpha over white).

Knows Pillow.
"""

from __future__ import annotations

import io
import struct

from PIL import Image as Pillow
from PIL import ImageOps

from triton_omni.errors import BadRequest, TooLarge
from triton_omni.media.types import Image, VisionSizes, smart_resize
from triton_omni.settings import RequestLimits

FORMATS = ("PNG", "JPEG", "WEBP")


def decode_image(data: bytes, limits: RequestLimits, sizes: VisionSizes) -> Image:
    """Decode a png, jpeg or webp file; of an animation the first frame.

    Raises:
        BadRequest: unreadable or truncated, or one side over 200 times the other.
        TooLarge: the header names more pixels than `limits.max_image_pixels`.
    """
    _check_webp_canvas(data, limits)
    try:
        opened = Pillow.open(io.BytesIO(data), formats=FORMATS)
        _check_pixels(opened.width, opened.height, limits)
        height, width = _target(opened, sizes)
        image = _on_white(ImageOps.exif_transpose(opened))
    except (Pillow.DecompressionBombError, Pillow.DecompressionBombWarning) as error:
        raise TooLarge(f"the limit is {limits.max_image_pixels} pixels: {error}") from error
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error) as error:  # Pillow's ways to fail
        raise BadRequest(f"unreadable image: {error}") from error
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


def _on_white(image: Pillow.Image) -> Pillow.Image:
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    ground = Pillow.new("RGB", layer.size, (255, 255, 255))
    ground.paste(layer, mask=layer.getchannel("A"))
    return ground
