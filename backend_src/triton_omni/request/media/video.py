# SPDX-License-Identifier: Apache-2.0
"""Videos to evenly sampled RGB frames and their sound, as the model card's recipe does (qwen-omni-utils).

Knows FFmpeg through PyAV. A frame becomes RGB only if it was sampled, and is resized before the next is decoded.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import av
import numpy as np
import torch
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.packet import Packet
from av.sidedata.sidedata import Type as SideDataType
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray

from triton_omni.core.errors import BadRequest, TooLarge
from triton_omni.core.settings import RequestLimits
from triton_omni.request.media.audio import decode_track
from triton_omni.request.media.files import open_file
from triton_omni.request.media.timing import STILL_SECONDS, Timeline, median_gap
from triton_omni.request.media.types import Audio, PixelRange, Video, VisionSizes, smart_resize
from triton_omni.request.media.video_tables import check_mp4, check_webm

logger = logging.getLogger(__name__)

Container = Literal["mp4", "webm"]

MAX_SOURCE_FPS = 240
"""Bounds how many frames are decoded for one second of video."""
MAX_PACKETS_PER_SECOND = 2000
"""Maximum packets a second of all tracks together; bounds the time that packets without pictures take."""
PICTURE_CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4", "mjpeg")
"""FFmpeg's decoders for the output of cameras, browsers and screen recorders; its others are never run."""
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
        container: its type by its first bytes; no other demuxer is tried.
        limits: of the deployment.
        sizes: sizes to which frames are resized.
        with_audio: take the audio track as well, if there is one.

    Raises:
        BadRequest: unreadable, without frames, or of sizes the model does not take.
        TooLarge: longer, or of more pixels a frame, than the limits allow.
    """
    if container == "mp4":
        check_mp4(data, limits)
    else:
        check_webm(data)
    file = _VideoFile(data, container, limits, sizes)
    try:
        frames, fps = file.read_frames()
        audio = file.read_audio() if with_audio else None
    except av.error.FFmpegError as error:
        raise BadRequest(f"unreadable video: {error.strerror}") from error
    return Video(frames, fps, audio)


def resize_frame(frame: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Resize bicubically with antialiasing in 8 bits, by the kernel of torchvision's `resize` for uint8 tensors.

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
    """One file in memory. Each pass opens it anew, so that an abandoned pass leaves nothing."""

    data: bytes = field(repr=False)
    container: Container
    limits: RequestLimits
    sizes: VisionSizes

    def read_frames(self) -> tuple[NDArray[np.uint8], float]:
        """Return sampled frames [T, H, W, 3] and their number a second."""
        track = self._survey()
        chosen, fps = self._choose(track, track.stamps)
        frames, shown = self._decode(chosen)
        if shown != track.stamps:
            # Damaged packets show no picture, nor do VP8's hidden frames: choose among those shown.
            if 2 * len(shown) < len(track.stamps):
                raise BadRequest(
                    f"damaged: {len(shown)} of {len(track.stamps)} pictures can be decoded, at least half are needed; "
                    "send an undamaged file"
                )
            chosen, fps = self._choose(track, shown)
            frames, again = self._decode(chosen)
            if again != shown:
                raise BadRequest(f"damaged: {len(shown)} pictures at one reading, {len(again)} at the next")
        return frames, fps

    def _choose(self, track: _Track, stamps: Sequence[int]) -> tuple[list[int], float]:
        """Return the time stamps of the sampled pictures, and their number a second."""
        times = [(stamp - track.stamps[0]) * track.tick for stamp in stamps]
        timeline = Timeline.of(times, track.end, track.stated_rate)
        self._check_length(timeline)
        most = min(self.limits.max_video_frames, self.sizes.max_frames or self.limits.max_video_frames)
        count = timeline.count(self.sizes.fps, most)
        return [stamps[number] for number in timeline.choose(count)], count / timeline.seconds

    def read_audio(self) -> Audio | None:
        """Return the first audio track; None = there is none."""
        with self._open() as source:
            return decode_track(source, self.limits.max_video_seconds + SOUND_SLACK_SECONDS)

    def _open(self) -> InputContainer:
        options = {"probesize": str(PROBED_BYTES), **self._decoder_options}
        return open_file(self.data, self.container, self.limits, options)

    @property
    def _decoder_options(self) -> dict[str, str]:
        """Return options that bound the frames for which a decoder allocates, whatever the container states."""
        return {"max_pixels": str(self.limits.max_image_pixels)}

    def _survey(self) -> _Track:
        """Return the times of the pictures by the packets' stamps, without decoding."""
        most = math.ceil(MAX_PACKETS_PER_SECOND * self.limits.max_video_seconds)
        with self._open() as source:
            stream = self._stream(source)
            sound = next(iter(source.streams.audio), None)
            pictures: list[tuple[int, int]] = []
            sound_end = 0.0
            for count, packet in enumerate(self._packets(source)):
                if count >= most:
                    raise TooLarge(f"more than {most} packets in its tracks, which is the limit")
                if packet.pts is None or packet.is_discard:
                    continue
                if packet.stream_index == stream.index:
                    pictures.append((packet.pts, packet.duration or 0))
                elif sound is not None and packet.stream_index == sound.index:
                    sound_end = max(sound_end, (packet.pts + (packet.duration or 0)) * _tick(sound))
            if not pictures:
                raise BadRequest("has no picture with a time stamp")
            self._check_work(len(pictures), stream.codec_context.width * stream.codec_context.height)
            return _Track.of(stream, sorted(pictures), sound_end)

    def _packets(self, source: InputContainer, *streams: VideoStream) -> Iterator[Packet[Any]]:
        """Yield the non-empty packets, up to where the file is unreadable."""
        try:
            for packet in source.demux(*streams):
                if packet.size:
                    yield packet
        except av.error.InvalidDataError:
            logger.info("a video cannot be read to its end; what came before is taken")

    def _decode(self, wanted: Sequence[int]) -> tuple[NDArray[np.uint8], list[int]]:
        """Return the frames of the time stamps `wanted`, which may repeat, and the stamps of all frames."""
        places: dict[int, list[int]] = {}
        for place, stamp in enumerate(wanted):
            places.setdefault(stamp, []).append(place)
        out: NDArray[np.uint8] | None = None
        shown: list[int] = []
        work = 0
        for frame in self._frames():
            work += frame.width * frame.height
            self._check_work(1, work)
            if frame.pts is None:
                continue
            shown.append(frame.pts)
            if found := places.pop(frame.pts, None):
                pixels = upright(frame)
                if out is None:
                    out = self._room(len(wanted), pixels)
                out[found] = resize_frame(pixels, out.shape[1], out.shape[2])
        if not shown:
            raise BadRequest("has no frame that can be decoded")
        return np.zeros((0, 0, 0, 3), np.uint8) if out is None else out, sorted(shown)

    def _frames(self) -> Iterator[VideoFrame]:
        """Yield all frames that can be decoded; a damaged packet gives none."""
        with self._open() as source:
            stream = self._stream(source)
            for packet in itertools.chain(self._packets(source, stream), (None,)):
                try:
                    yield from stream.decode(packet)
                except av.error.InvalidDataError:
                    logger.debug("a damaged packet of a video is left out")

    def _room(self, count: int, first: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Allocate the result: the frames share `max_video_pixels`, but none is scaled under 1.05 x the least size.

        qwen-vl-utils divides its `total_pixels` in the same way, but counts a pair of frames, which become one, once.
        """
        least = self.sizes.frame.low
        most = min(self.sizes.frame.high, max(self.limits.max_video_pixels // count, int(least * 1.05)))
        height, width = smart_resize(first.shape[0], first.shape[1], self.sizes.factor, PixelRange(least, most))
        return np.zeros((count, height, width, 3), np.uint8)

    def _stream(self, source: InputContainer) -> VideoStream:
        if not source.streams.video:
            raise BadRequest("has no video track")
        stream = source.streams.video[0]
        context = _known_codec(stream)
        if context.name not in PICTURE_CODECS:
            raise BadRequest(
                f"the codec of its video track is {context.name}, allowed are {', '.join(PICTURE_CODECS)}; convert it"
            )
        self._check_pixels(context.width, context.height)
        context.options, context.thread_count = self._decoder_options, 1
        return stream

    def _check_pixels(self, width: int, height: int) -> None:
        if width < 1 or height < 1:
            raise BadRequest(f"frames of no size, or of more than {self.limits.max_image_pixels} pixels")
        if width * height > self.limits.max_image_pixels:
            raise TooLarge(f"frames of {width} x {height} pixels, the limit is {self.limits.max_image_pixels} in all")

    def _check_work(self, frames: int, pixels: int) -> None:
        """Refuse a video that would take minutes to decode: a frame without motion takes only a few bytes."""
        limit = self.limits.max_video_source_pixels
        if frames * pixels > limit:
            raise TooLarge(f"{frames * pixels} pixels in all frames before they are scaled, the limit is {limit}")

    def _check_length(self, timeline: Timeline) -> None:
        seconds, pictures = timeline.seconds, len(timeline.times)
        if seconds > self.limits.max_video_seconds:
            raise TooLarge(
                f"{seconds:.1f} seconds of video, the limit is {self.limits.max_video_seconds:g}; send a part of it"
            )
        if pictures > max(seconds * MAX_SOURCE_FPS, 1):
            raise BadRequest(f"{pictures} pictures in {seconds:g} seconds, allowed are up to {MAX_SOURCE_FPS} a second")


@dataclass(frozen=True)
class _Track:
    """Facts about a video track's pictures, from its packets."""

    stamps: list[int]
    """Ascending."""
    tick: float
    """Seconds of one unit of the stamps."""
    stated_rate: float | None
    end: float
    """Seconds from the first picture to the end of the last."""

    @classmethod
    def of(cls, stream: VideoStream, pictures: Sequence[tuple[int, int]], sound_end: float) -> _Track:
        """Build it from stamps and durations, ascending; `sound_end` in seconds."""
        stamps, tick = [stamp for stamp, _ in pictures], _tick(stream)
        end = stamps[-1] + median_gap(stamps)
        # The last picture is shown until all tracks have ended, as in viewers. A slightly later end comes from an
        # encoder's padding or a guessed rate.
        stays = max(stamps[-1] + pictures[-1][1], sound_end / tick)
        end = stays if (stays - end) * tick > STILL_SECONDS else end
        rate = stream.average_rate
        return cls(stamps, tick, float(rate) if rate else None, (end - stamps[0]) * tick)


def _tick(stream: VideoStream | AudioStream) -> float:
    return float(stream.time_base or 1)


def _known_codec(stream: VideoStream) -> VideoCodecContext:
    """The decoder of a track; PyAV has None for a codec that this FFmpeg does not know."""
    context = cast("VideoCodecContext | None", stream.codec_context)
    if context is None:
        raise BadRequest(f"the codec of its {stream.type} track is unknown")
    return context


def upright(frame: VideoFrame) -> NDArray[np.uint8]:
    """Return RGB [H, W, 3], turned and mirrored by the file's display matrix, as for upright videos of phones.

    The matrix takes (x, y) to (a x + c y, b x + d y). Only the larger part of each axis counts, which leaves eight
    cases.
    """
    pixels = cast("NDArray[np.uint8]", frame.to_ndarray(format="rgb24", threads=1))
    matrix = cast("Mapping[SideDataType, bytes]", frame.side_data).get(SideDataType.DISPLAYMATRIX)
    if matrix is None:
        return pixels
    a, b, _, c, d = np.frombuffer(matrix, np.int32, 5).tolist()
    if abs(b) + abs(c) > abs(a) + abs(d):
        pixels, a, d = pixels.transpose(1, 0, 2), c, b
    return pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]
