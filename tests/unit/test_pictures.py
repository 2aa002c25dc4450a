# SPDX-License-Identifier: Apache-2.0
"""Pictures as a viewer shows them: depths, orientations, damaged EXIF, and files that hold more than a picture."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image as Pillow
from PIL import ImageOps

import media_samples as samples
from triton_omni.core.errors import BadRequest
from triton_omni.core.settings import RequestLimits
from triton_omni.request.media.image import MAX_PARTS, decode_image, picture_parts
from triton_omni.request.media.types import VisionSizes

LIMITS, SIZES = RequestLimits(), VisionSizes()
WIDTH, HEIGHT = 84, 56
KINDS = pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])


def decoded(data: bytes) -> np.ndarray:
    return np.asarray(decode_image(data, LIMITS, SIZES).pixels)


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png_of_16_bits(pixels: np.ndarray, colours: int, *more: bytes) -> bytes:
    """A png of [H, W, C] with 16 bits a sample; `colours` is the format's number for what C is."""
    height, width = pixels.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 16, colours, 0, 0, 0)
    chunks = chunk(b"IHDR", header), *more, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def ramp(channels: int) -> np.ndarray:
    """All of 16 bits, dark to light: [56, 84, C]."""
    values = np.linspace(0, 65535, WIDTH * HEIGHT).astype(np.uint16).reshape(HEIGHT, WIDTH, 1)
    return np.concatenate([np.roll(values, 7 * channel, axis=1) for channel in range(channels)], axis=2)


class TestDepth:
    def test_gray_of_16_bits_is_scaled(self):
        gray = ramp(1)
        expected = np.repeat(np.round(gray / 65535 * 255), 3, axis=2)
        np.testing.assert_array_equal(decoded(png_of_16_bits(gray, 0)), expected)
        saved = samples.encode_image(Pillow.fromarray(gray[..., 0]), "png")
        np.testing.assert_array_equal(decoded(saved), expected)

    def test_a_transparent_gray_of_16_bits_lies_over_white(self):
        gray = ramp(1)
        gray[:28] = 4660
        found = decoded(png_of_16_bits(gray, 0, chunk(b"tRNS", struct.pack(">H", 4660))))
        assert (found[:28] == 255).all()
        np.testing.assert_array_equal(found[28:, :, 0], np.round(gray[28:, :, 0] / 65535 * 255))

    @pytest.mark.parametrize(("channels", "colours"), [(2, 4), (3, 2), (4, 6)], ids=["gray alpha", "rgb", "rgb alpha"])
    def test_other_colours_of_16_bits_are_scaled(self, channels, colours):
        pixels = ramp(channels)
        if channels in (2, 4):
            pixels[..., -1] = 65535
        expected = pixels[..., :3] if channels > 2 else np.repeat(pixels[..., :1], 3, axis=2)
        assert np.abs(decoded(png_of_16_bits(pixels, colours)) - expected / 257).max() <= 1

    def test_gray_of_16_bits_is_turned_as_its_exif_says(self):
        exif = Pillow.Exif()
        exif[0x0112] = 6
        gray = ramp(1)
        found = decoded(png_of_16_bits(gray, 0, chunk(b"eXIf", exif.tobytes()[6:])))
        np.testing.assert_array_equal(found[..., 0], np.rot90(np.round(gray[..., 0] / 65535 * 255), -1))


def with_exif(kind: str, block: bytes) -> bytes:
    """A picture with these bytes as its EXIF block, unchecked."""
    if kind == "webp":
        return samples.image_file("webp", WIDTH, HEIGHT, lossless=True, exif=block)
    whole = samples.image_file(kind, WIDTH, HEIGHT)
    if kind == "png":
        return whole[:33] + chunk(b"eXIf", block) + whole[33:]
    segment = b"Exif\0\0" + block
    return whole[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + whole[2:]


def tiff(orientation: int) -> bytes:
    exif = Pillow.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()[6:]


def entry(tag: int, kind: int, count: int, value: int) -> bytes:
    """A TIFF block of one entry."""
    return b"MM\0\x2a\0\0\0\x08\0\x01" + struct.pack(">HHII", tag, kind, count, value) + bytes(4)


DAMAGED = {
    "nothing": b"",
    "noise": bytes(range(1, 200)),
    "no byte order": b"XX" + tiff(6)[2:],
    "cut": tiff(6)[:13],
    "far directory": b"MM\0\x2a\xff\xff\xff\xf0" + bytes(20),
    "many entries": b"MM\0\x2a\0\0\0\x08\xff\xff" + b"\x01\x12" * 40,
    "text": entry(0x0112, 2, 4, 0x41424300),
    "a fraction": entry(0x0112, 5, 1, 8),
    "a number of none": entry(0x0112, 3, 1, 99 << 16),
    "two numbers": entry(0x0112, 3, 2, 6 << 16 | 6),
    "a length of gigabytes": entry(0x0112, 3, 0x7FFFFFFF, 6 << 16),
    "an unknown type": entry(0x0112, 77, 1, 6 << 16),
}


class TestOrientation:
    @KINDS
    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_every_orientation_is_shown_upright(self, kind, orientation):
        data = with_exif(kind, tiff(orientation))
        expected = ImageOps.exif_transpose(Pillow.open(io.BytesIO(data))).convert("RGB")
        np.testing.assert_array_equal(decoded(data), np.asarray(expected))
        assert decoded(data).shape[:2] == ((HEIGHT, WIDTH) if orientation < 5 else (WIDTH, HEIGHT))

    @pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of what it does without
    @KINDS
    @pytest.mark.parametrize("name", DAMAGED)
    def test_a_damaged_exif_block_refuses_nothing(self, kind, name):
        plain = samples.image_file(kind, WIDTH, HEIGHT, **({"lossless": True} if kind == "webp" else {}))
        found = decoded(with_exif(kind, DAMAGED[name] or b"\0"))
        assert found.shape in ((HEIGHT, WIDTH, 3), (WIDTH, HEIGHT, 3))
        if name != "two numbers":
            np.testing.assert_array_equal(found, decoded(plain))

    def test_a_wrong_checksum_of_a_block_refuses_nothing(self):
        data = bytearray(with_exif("png", tiff(6)))
        data[data.index(b"eXIf") + 5] ^= 1
        assert decoded(bytes(data)).shape in ((HEIGHT, WIDTH, 3), (WIDTH, HEIGHT, 3))

    def test_the_orientation_of_xmp_is_read_where_exif_has_none(self):
        whole = samples.image_file("jpeg", WIDTH, HEIGHT)
        said = b'http://ns.adobe.com/xap/1.0/\0<rdf:Description tiff:Orientation="8"/>'
        segment = b"\xff\xe1" + struct.pack(">H", len(said) + 2) + said
        np.testing.assert_array_equal(decoded(whole[:2] + segment + whole[2:]), np.rot90(decoded(whole), 1))


class TestOtherParts:
    @KINDS
    @pytest.mark.parametrize("after", ["film", "scans", "chunks", "noise"])
    def test_what_lies_after_a_picture_is_nobody_s(self, kind, after):
        whole = samples.image_file(kind, WIDTH, HEIGHT, quality=90)
        more = {
            "film": samples.video_file("mp4"),
            "scans": b"\xff\xda\0\x08" * 1000,
            "chunks": chunk(b"iCCP", b"a\0\0") * (MAX_PARTS + 1),
            "noise": np.random.default_rng(0).bytes(100_000),
        }[after]
        np.testing.assert_array_equal(decoded(whole + more), decoded(whole))
        assert len(picture_parts(whole + more).picture) <= len(whole)

    def test_a_picture_of_several_takes_the_first(self):
        frames = [Pillow.fromarray(samples.picture(WIDTH, HEIGHT, seed)) for seed in range(3)]
        for kind, options in (("png", {}), ("webp", {"lossless": True}), ("mpo", {"quality": 95})):
            out = io.BytesIO()
            frames[0].save(out, kind, save_all=True, append_images=frames[1:], **options)
            first = Pillow.open(io.BytesIO(out.getvalue())).convert("RGB")
            np.testing.assert_array_equal(decoded(out.getvalue()), np.asarray(first))

    @pytest.mark.parametrize(
        ("name", "data"),
        [
            ("segments of a jpeg", samples.image_file("jpeg")[:2] + b"\xff\xfe\0\2" * (MAX_PARTS + 1)),
            ("scans of a jpeg", samples.image_file("jpeg")[:-2] + b"\xff\xda\0\2" * 101),
            ("chunks of a png", samples.image_file("png")[:33] + chunk(b"tEXt", b"") * (MAX_PARTS + 1)),
        ],
    )
    def test_more_parts_than_encoders_write_are_refused(self, name, data):
        with pytest.raises(BadRequest, match=rf"^over \d+ {name}, which is the limit; save the picture anew$"):
            decode_image(data, LIMITS, SIZES)

    def test_metadata_do_not_reach_the_codec(self):
        exif, comment = b"Exif\0\0" + tiff(3), b"said"
        whole = samples.image_file("jpeg", WIDTH, HEIGHT, comment=comment, icc_profile=b"profile" * 20_000, exif=exif)
        parts = picture_parts(whole)
        assert parts.exif is not None
        assert parts.exif.startswith(exif)
        for name in (b"Exif", b"said", b"ICC_PROFILE"):
            assert name in whole
            assert name not in parts.picture
        whole = samples.image_file("png", WIDTH, HEIGHT, icc_profile=b"profile" * 20, exif=exif)
        parts = picture_parts(whole)
        assert parts.exif == exif[6:]
        assert [name for name in (b"eXIf", b"iCCP") if name in parts.picture] == []

    @pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
    @pytest.mark.parametrize("progressive", [False, True])
    def test_the_picture_of_a_jpeg_is_what_it_was(self, mode, progressive):
        image = Pillow.fromarray(samples.picture(WIDTH, HEIGHT)).convert(mode)
        data = samples.encode_image(image, "jpeg", progressive=progressive, restart_marker_blocks=2)
        expected = Pillow.open(io.BytesIO(data)).convert("RGB")
        np.testing.assert_array_equal(decoded(data), np.asarray(expected))

    def test_fill_bytes_and_junk_before_a_segment_are_skipped(self):
        whole = samples.image_file("jpeg", WIDTH, HEIGHT)
        for junk in (b"\xff" * 1000, b"\0" * 1000, b"\xff\0" * 500):
            np.testing.assert_array_equal(decoded(whole[:2] + junk + whole[2:]), decoded(whole))
            assert len(picture_parts(whole[:2] + junk + whole[2:]).picture) == len(whole)
