# SPDX-License-Identifier: Apache-2.0
"""Decoded media, and the sizes to which vision inputs are resized.

Knows no codec.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image as PilImage
from PIL.Image import fromarray

from triton_omni.core.errors import BadRequest
from triton_omni.request.media.timing import FPS
from triton_omni.session.engine import Features

SAMPLE_RATE = 16000
"""Samples a second of the audio encoder's input."""
MAX_ASPECT_RATIO = 200


@dataclass(frozen=True, kw_only=True)
class _Decoded:
    """Facts of every decoded medium besides its content; a decoding process does not send them."""

    cpu_seconds: float = field(default=0.0, compare=False)
    """CPU time of decoding it."""
    features: Features = field(default_factory=Features, repr=False, compare=False)


@dataclass(frozen=True)
class Audio(_Decoded):
    """Mono sound at 16 kHz."""

    samples: NDArray[np.float32] = field(repr=False)
    """[S], nominally in [-1, 1]."""
    pieces: tuple[Audio, ...] = field(default=(), repr=False, compare=False)
    """Its windows, each with features of its own; empty = it has features as a whole."""

    def __reduce__(self) -> tuple[type[Audio], tuple[NDArray[np.float32]]]:
        """Pickle the samples alone."""
        return Audio, (self.samples,)

    @property
    def outline(self) -> Audio:
        """Return the same length without the samples, which the features stand for."""
        silence = np.broadcast_to(np.float32(0), self.samples.shape)
        return replace(self, samples=silence, pieces=tuple(piece.outline for piece in self.pieces))

    @property
    def items(self) -> tuple[Audio, ...]:
        """The parts that the thinker processes one by one."""
        return self.pieces or (self,)


@dataclass(frozen=True)
class Image(_Decoded):
    """One picture, upright, RGB, both sides a multiple of the patch factor."""

    pixels: PilImage | NDArray[np.uint8] = field(repr=False)
    """Pillow's image; of an outline an array [H, W, 3]."""

    @property
    def outline(self) -> Image:
        """Return the same size without the pixels, which the features stand for."""
        return replace(self, pixels=np.broadcast_to(np.uint8(0), np.asarray(self.pixels).shape))

    def __reduce__(self) -> tuple[Callable[[NDArray[np.uint8]], Image], tuple[NDArray[np.uint8]]]:
        """Pickle the image as an array, which travels outside the pickle and is copied less often."""
        return image_of, (np.asarray(self.pixels),)


def image_of(pixels: NDArray[np.uint8]) -> Image:
    """The picture of RGB pixels [H, W, 3]."""
    return Image(fromarray(pixels))


@dataclass(frozen=True)
class Video(_Decoded):
    """Frames sampled evenly in time, and the sound where it was asked for."""

    frames: NDArray[np.uint8] = field(repr=False)
    """[T, H, W, 3], T even."""
    fps: float
    """Frames a second of video time: their number by the seconds that the video lasts."""
    audio: Audio | None = None
    """None: not asked for, or the file has no audio track."""

    def __reduce__(self) -> tuple[type[Video], tuple[NDArray[np.uint8], float, Audio | None]]:
        """Pickle what was decoded alone."""
        return Video, (self.frames, self.fps, self.audio)

    @property
    def outline(self) -> Video:
        """Return the same frames and sound without their content, which the features stand for."""
        sound = None if self.audio is None else self.audio.outline
        return replace(self, frames=np.broadcast_to(np.uint8(0), self.frames.shape), audio=sound)


Medium = Audio | Image | Video


@dataclass(frozen=True)
class PixelRange:
    """Least and most pixels of one picture after resizing."""

    low: int
    high: int


@dataclass(frozen=True)
class VisionSizes:
    """Limits of the number of frames, and of the sizes to which pictures and frames are resized.

    The defaults are those of the model card's recipe (qwen-omni-utils).

    `factor` = patch size x spatial merge. The checkpoint's processor resizes again, which changes nothing when both
    hold the same ranges.
    """

    factor: int = 28
    image: PixelRange = PixelRange(4 * 28 * 28, 16384 * 28 * 28)
    frame: PixelRange = PixelRange(128 * 28 * 28, 768 * 28 * 28)
    fps: float = FPS
    """Frames a second."""
    max_frames: int | None = None
    """Frames of one video; None = the deployment's limit."""

    def within(self, fps: float | None, max_frames: int | None, max_pixels: int | None) -> VisionSizes:
        """Return these sizes, narrowed by a request; None leaves a value unchanged."""
        chosen = self if fps is None else replace(self, fps=fps)
        if max_pixels is not None:
            image, frame = (PixelRange(kind.low, min(kind.high, max_pixels)) for kind in (self.image, self.frame))
            chosen = replace(chosen, image=image, frame=frame)
        return replace(chosen, max_frames=max_frames)


def smart_resize(height: int, width: int, factor: int, pixels: PixelRange) -> tuple[int, int]:
    """Height and width that keep the aspect ratio, are multiples of `factor` and hold a number of pixels in `pixels`.

    The same figures as `smart_resize` of HF's Qwen2-VL image processor.

    Raises:
        BadRequest: one side is over 200 times the other, which the model does not take.
    """
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise BadRequest(f"{width} x {height} pixels: one side may be at most {MAX_ASPECT_RATIO} times the other")
    new_height = max(factor, round(height / factor) * factor)
    new_width = max(factor, round(width / factor) * factor)
    if new_height * new_width > pixels.high:
        shrink = math.sqrt(height * width / pixels.high)
        return _floor(height / shrink, factor), _floor(width / shrink, factor)
    if new_height * new_width < pixels.low:
        grow = math.sqrt(pixels.low / (height * width))
        return math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return new_height, new_width


def _floor(side: float, factor: int) -> int:
    return max(factor, math.floor(side / factor) * factor)
