# SPDX-License-Identifier: Apache-2.0
"""Videos to evenly sampled RGB frames and their sound, as the model card's recipe does (qwen-omni-utils).

Knows FFmpeg through PyAV. A frame becomes RGB only if it was sampled, and is resized before the next is decoded.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass, field
from typing import Literal, cast

import av
import numpy as np
import torch
from av.container import InputContainer
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray

from triton_omni.errors import BadRequest, TooLarge
from triton_omni.media.audio import decode_track
from triton_omni.media.mp4_tables import check_tables
from triton_omni.media.types import Audio, PixelRange, Video, VisionSizes, smart_resize
from triton_omni.settings import RequestLimits

Container = Literal["mp4", "webm"]

FPS = 2.0
FRAME_FACTOR = 2
"""Frames are merged in pairs, so their number is even."""
MIN_FRAMES = 4
MAX_SOURCE_FPS = 240
"""Bounds how many frames are decoded for one second of video."""
MAX_PACKETS_PER_SECOND = 2000
"""Of all tracks together; bounds how long it takes to read what holds no picture."""
PROBED_BYTES = 1 << 20
"""FFmpeg holds this much of a file as packets, each in a few hundred bytes, before it knows the tracks."""
SOUND_SLACK_SECONDS = 1.0
"""Sound may end after the last picture: encoders pad it to whole packets."""


def decode_video(
    data: bytes,
    container: Container,
    limits: RequestLimits,
    sizes: VisionSizes,
    *,
    with_audio: bool,
) -> Video:
    """Decode an mp4 or webm file.

    Args:
        data: the file.
        container: what its first bytes say it is; no other demuxer is tried.
        limits: of the deployment.
        sizes: what frames are resized to.
        with_audio: take the audio track as well, if there is one.

    Raises:
        BadRequest: unreadable, without frames, or of sizes the model does not take.
        TooLarge: longer, or of more pixels a frame, than the limits allow.
    """
    if container == "mp4":
        check_tables(data, limits)
    file = _VideoFile(data, container, limits, sizes)
    try:
        frames, fps = file.read_frames()
        audio = file.read_audio() if with_audio else None
    except av.error.FFmpegError as error:
        raise BadRequest(f"unreadable video: {error.strerror}") from error
    return Video(frames, fps, audio)


def frame_count(total: int, source_fps: float, most: int) -> int:
    """How many of `total` frames are sampled: 2 a second, at least 4, even (`smart_nframes` of qwen-vl-utils).

    Raises:
        BadRequest: fewer than two frames.
    """
    if total < FRAME_FACTOR:
        raise BadRequest(f"{total} frames, at least {FRAME_FACTOR} are needed")
    count = min(max(total / source_fps * FPS, MIN_FRAMES), most, total)
    return math.floor(count / FRAME_FACTOR) * FRAME_FACTOR


def resize_frame(frame: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Bicubic with antialiasing in 8 bits, the kernel that torchvision's `resize` uses for a uint8 tensor.

    Args:
        frame: [H, W, 3].
        height: of the result.
        width: of the result.
    """
    if frame.shape[:2] == (height, width):
        return frame
    pixels = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1)[None]
    resized = torch.nn.functional.interpolate(
        pixels, (height, width), mode="bicubic", align_corners=False, antialias=True
    )
    out: NDArray[np.uint8] = resized[0].permute(1, 2, 0).numpy()
    return out


@dataclass(frozen=True)
class _VideoFile:
    """One file in memory; every pass over it opens it anew, so a pass that is given up leaves nothing behind."""

    data: bytes = field(repr=False)
    container: Container
    limits: RequestLimits
    sizes: VisionSizes

    def read_frames(self) -> tuple[NDArray[np.uint8], float]:
        """Sampled frames [T, H, W, 3] and how many a second they are."""
        total, source_fps = self._count_packets()
        frames, count, decoded = self._sample(total, source_fps)
        if decoded != total:
            # Packets that show no picture (VP8's hidden frames, damaged ones) do not count: sample among those shown.
            total = self._checked_total(decoded, source_fps)
            frames, count, decoded = self._sample(total, source_fps)
        if decoded != total:
            raise BadRequest(f"damaged: {total} frames at one reading, {decoded} at the next")
        return frames, count / total * source_fps

    def _sample(self, total: int, source_fps: float) -> tuple[NDArray[np.uint8], int, int]:
        """Frames sampled from `total`, their number, and how many there really were to sample from."""
        count = frame_count(total, source_fps, self.limits.max_video_frames)
        wanted = torch.linspace(0, total - 1, count).round().long().tolist()
        frames, decoded = self._decode(wanted)
        return frames, count, decoded

    def read_audio(self) -> Audio | None:
        """The first audio track, or None where there is none."""
        with self._open() as source:
            return decode_track(source, self.limits.max_video_seconds + SOUND_SLACK_SECONDS)

    def _open(self) -> InputContainer:
        options = {"probesize": str(PROBED_BYTES), **self._decoder_options}
        return av.open(
            io.BytesIO(self.data), mode="r", format=self.container, metadata_errors="replace", options=options
        )

    @property
    def _decoder_options(self) -> dict[str, str]:
        """A decoder makes no room for larger frames, whatever the container says they are."""
        return {"max_pixels": str(self.limits.max_image_pixels)}

    def _count_packets(self) -> tuple[int, float]:
        """Packets of the video stream, nearly always one a frame, and frames a second; nothing is decoded."""
        with self._open() as source:
            stream = self._stream(source)
            rate = stream.average_rate or stream.guessed_rate
            if rate is None or not 0 < rate <= MAX_SOURCE_FPS:
                raise BadRequest(f"{rate} frames a second, allowed are up to {MAX_SOURCE_FPS}")
            total = self._count_shown(source, stream, float(rate))
            self._check_work(total, stream.codec_context.width * stream.codec_context.height)
            return total, float(rate)

    def _count_shown(self, source: InputContainer, stream: VideoStream, source_fps: float) -> int:
        most = math.ceil(MAX_PACKETS_PER_SECOND * self.limits.max_video_seconds)
        total = 0
        for count, packet in enumerate(source.demux()):
            if count >= most:
                raise TooLarge(f"more than {most} packets in its tracks, which is the limit")
            if packet.stream_index == stream.index and packet.size > 0:
                total += 1
        return self._checked_total(total, source_fps)

    def _decode(self, wanted: list[int]) -> tuple[NDArray[np.uint8], int]:
        """The frames of the numbers `wanted` (ascending, none twice), and how many frames there were in all."""
        places = {index: place for place, index in enumerate(wanted)}
        out: NDArray[np.uint8] | None = None
        decoded = work = 0
        with self._open() as source:
            for frame in source.decode(self._stream(source)):
                work += frame.width * frame.height
                self._check_work(1, work)
                if (place := places.get(decoded)) is not None:
                    pixels = _upright(frame)
                    if out is None:
                        out = self._room(len(wanted), pixels)
                    out[place] = resize_frame(pixels, out.shape[1], out.shape[2])
                decoded += 1
                self._checked_total(decoded, MAX_SOURCE_FPS)
        if out is None:
            raise BadRequest("has no frame that can be decoded")
        return out, decoded

    def _room(self, count: int, first: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """An empty result: the frames share `max_video_pixels`, but none is scaled under 1.05 x the least size.

        qwen-vl-utils divides its `total_pixels` in the same way, but counts a pair of frames, which become one, once.
        """
        least = self.sizes.frame.low
        most = max(min(self.sizes.frame.high, self.limits.max_video_pixels // count), int(least * 1.05))
        height, width = smart_resize(first.shape[0], first.shape[1], self.sizes.factor, PixelRange(least, most))
        return np.zeros((count, height, width, 3), np.uint8)

    def _stream(self, source: InputContainer) -> VideoStream:
        if not source.streams.video:
            raise BadRequest("has no video track")
        stream = source.streams.video[0]
        context = _known_codec(stream)
        self._check_pixels(context.width, context.height)
        context.options = self._decoder_options
        return stream

    def _check_pixels(self, width: int, height: int) -> None:
        if width < 1 or height < 1:
            raise BadRequest(f"frames of no size, or of more than {self.limits.max_image_pixels} pixels")
        if width * height > self.limits.max_image_pixels:
            raise TooLarge(f"frames of {width} x {height} pixels, the limit is {self.limits.max_image_pixels} in all")

    def _check_work(self, frames: int, pixels: int) -> None:
        """Refuse what would take minutes to decode: a frame in which nothing moves costs a few bytes of the file."""
        limit = self.limits.max_video_source_pixels
        if frames * pixels > limit:
            raise TooLarge(f"{frames * pixels} pixels in all frames before they are scaled, the limit is {limit}")

    def _checked_total(self, total: int, source_fps: float) -> int:
        seconds = total / source_fps
        if seconds > self.limits.max_video_seconds:
            raise TooLarge(f"{seconds:.1f} seconds of video, the limit is {self.limits.max_video_seconds:g}")
        return total


def _known_codec(stream: VideoStream) -> VideoCodecContext:
    """The decoder of a track; PyAV has None for a codec that this FFmpeg does not know."""
    context = cast("VideoCodecContext | None", stream.codec_context)
    if context is None:
        raise BadRequest(f"the codec of its {stream.type} track is unknown")
    return context


def _upright(frame: VideoFrame) -> NDArray[np.uint8]:
    """RGB [H, W, 3], turned as the file's display matrix says (phones film upright that way)."""
    pixels = cast("NDArray[np.uint8]", frame.to_ndarray(format="rgb24"))
    return np.rot90(pixels, round(frame.rotation / 90)) if frame.rotation else pixels
