# SPDX-License-Identifier: Apache-2.0
"""Decoded media against the model card's own recipe: what the package qwen-omni-utils made of the same files.

`goldens/qwen_omni_utils.json` has it; the script beside it wrote it, with the package itself.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

import media_samples as samples
from triton_omni.core.errors import BadRequest
from triton_omni.core.settings import RequestLimits
from triton_omni.request.media.audio import decode_audio
from triton_omni.request.media.image import decode_image
from triton_omni.request.media.timing import frame_count
from triton_omni.request.media.types import PixelRange, VisionSizes, smart_resize
from triton_omni.request.media.video import decode_video, resize_frame

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "qwen_omni_utils.json").read_text(encoding="utf-8"))
LIMITS, SIZES = RequestLimits(), VisionSizes()
COLOUR = 1.5
"""Largest difference of two builds of a decoder, of 255, in a mean over a quarter of a picture."""
ENCODERS_DB = 45
"""FFmpeg's encoders of sound give other bits on other processors; a sample's shift would be 15 dB."""


def made_as(case: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in case["made"].items())


def cases(table: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", GOLDENS[table], ids=made_as)


def grid(pixels: np.ndarray) -> list[float]:
    """Means of the four quarters of a picture [H, W, 3], by colour."""
    height, width = (side // 2 for side in pixels.shape[:2])
    quarters = [pixels[top:, left:][:height, :width] for top in (0, height) for left in (0, width)]
    return [float(mean) for quarter in quarters for mean in quarter.mean(axis=(0, 1))]


def counted(total: int, rate: float, most: int) -> int | None:
    try:
        return frame_count(total, rate, most)
    except BadRequest:
        return None


def resized(height: int, width: int, pixels: PixelRange) -> list[int] | None:
    try:
        return list(smart_resize(height, width, SIZES.factor, pixels))
    except BadRequest:
        return None


def decibels(expected: np.ndarray, found: np.ndarray) -> float:
    """Return the ratio in dB of the expected sound to the difference."""
    return float(10 * np.log10(np.mean(expected**2) / (np.mean((found - expected) ** 2) + 1e-20)))


def test_as_many_frames_are_taken() -> None:
    rows = GOLDENS["frame_counts"]
    assert len(rows) > 150
    assert [[*row[:3], counted(*row[:3])] for row in rows] == rows


@pytest.mark.parametrize(("table", "pixels"), [("image_sizes", SIZES.image), ("frame_sizes", SIZES.frame)])
def test_pictures_get_the_same_size(table: str, pixels: PixelRange) -> None:
    rows = GOLDENS[table]
    assert len(rows) > 100
    assert [[height, width, resized(height, width, pixels)] for height, width, _ in rows] == rows


@cases("images")
def test_pictures_look_the_same(case: dict[str, Any]) -> None:
    pixels = np.asarray(decode_image(samples.encode_image(samples.image_of(case["made"]), "png"), LIMITS, SIZES).pixels)
    assert list(pixels.shape[:2]) == case["size"]
    np.testing.assert_allclose(grid(pixels), case["grid"], atol=COLOUR)


@cases("videos")
def test_the_same_frames_are_taken_of_a_video_and_look_the_same(case: dict[str, Any]) -> None:
    data = samples.video_of(case["made"])
    decoded = decode_video(data, case["made"].get("kind", "mp4"), LIMITS, SIZES, with_audio=False)
    assert list(decoded.frames.shape[1:3]) == case["size"]
    assert decoded.fps == pytest.approx(case["fps"], rel=1e-4)
    with av.open(io.BytesIO(data)) as source:
        shown = [frame.to_ndarray(format="rgb24") for frame in source.decode(video=0)]
    expected = [resize_frame(shown[index], *case["size"]) for index in case["frames"]]
    np.testing.assert_array_equal(decoded.frames, expected)
    np.testing.assert_allclose([grid(frame) for frame in decoded.frames], case["grids"], atol=COLOUR)


@cases("shared_pixels")
def test_frames_share_pixels_alike(case: dict[str, Any]) -> None:
    # The recipe counts pairs of frames, which become one; our limit counts frames.
    limits = LIMITS.model_copy(update={"max_video_pixels": 2 * case["total_pixels"]})
    decoded = decode_video(samples.video_of(case["made"]), "mp4", limits, SIZES, with_audio=False)
    assert list(decoded.frames.shape[1:3]) == case["size"]


@cases("sounds")
def test_sounds_become_the_same_samples(case: dict[str, Any]) -> None:
    found = decode_audio(samples.audio_file(**case["made"]), LIMITS).samples
    assert len(found) == case["length"]
    np.testing.assert_allclose(found[::53], case["samples"], atol=2e-5)


@cases("long_sounds")
def test_compressed_sounds_of_seconds_become_the_same_samples(case: dict[str, Any]) -> None:
    found = decode_audio(samples.encoded_sound(**case["made"]), LIMITS).samples
    assert len(found) == case["length"]
    assert decibels(np.array(case["samples"]), found[::499]) > ENCODERS_DB


@cases("sounds_of_videos")
def test_the_sound_of_a_video_becomes_the_same_samples(case: dict[str, Any]) -> None:
    data = samples.video_of(case["made"])
    decoded = decode_video(data, case["made"]["kind"], LIMITS, SIZES, with_audio=True)
    assert decoded.audio is not None
    assert len(decoded.audio.samples) == case["length"]
    assert decibels(np.array(case["samples"]), decoded.audio.samples[::53]) > ENCODERS_DB
