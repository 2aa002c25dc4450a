# SPDX-License-Identifier: Apache-2.0
"""Measures the CPU seconds that decoding two minutes of 1080p takes, for each codec that FFmpeg can encode here.

    python scripts/decode_cost.py

Each codec encodes two synthetic clips, moving pictures and noise, and decodes them on one thread as the server does.
From both follow the cost of a pixel and of a byte, and of the largest video that the shipped limits let in.
The table is in docs/limits.md.
"""

from __future__ import annotations

import argparse
import io
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, cast

import av
import numpy as np
from av.video.stream import VideoStream
from markdown_table import table
from numpy.typing import NDArray

from triton_omni.core.settings import RequestLimits

WIDTH, HEIGHT, RATE = 1920, 1080, 30
LENGTH_S = 120
FULL_PIXELS = WIDTH * HEIGHT * RATE * LENGTH_S
Content = Literal["moving", "noise"]
BITS: dict[Content, int] = {"moving": 12_000_000, "noise": 65_000_000}
"""Bits a second that the encoders aim at."""


@dataclass(frozen=True)
class Codec:
    """A codec as people name it, its encoder in FFmpeg, its container and the encoder's options."""

    name: str
    encoder: str
    container: Literal["mp4", "webm"]
    options: dict[str, str]


CODECS = (
    Codec("VP9", "libvpx-vp9", "webm", {"deadline": "good", "cpu-used": "5"}),
    Codec("HEVC", "libx265", "mp4", {"preset": "fast", "x265-params": "log-level=error"}),
    Codec("AV1", "libsvtav1", "mp4", {"preset": "10", "svtav1-params": "rc=1"}),
    Codec("H.264", "libx264", "mp4", {"preset": "medium"}),
    Codec("VP8", "libvpx", "webm", {"deadline": "good", "cpu-used": "5"}),
    Codec("MPEG-4", "mpeg4", "mp4", {}),
    Codec("Motion JPEG", "mjpeg", "mp4", {}),
)


@dataclass(frozen=True)
class Cost:
    """CPU seconds that decoding a clip took, pixels of all its frames, bytes of its file."""

    seconds: float
    pixels: int
    size: int

    @property
    def full_s(self) -> float:
        """CPU seconds for two minutes of the same."""
        return self.seconds * FULL_PIXELS / self.pixels

    @property
    def full_bytes(self) -> float:
        """Bytes of two minutes of the same."""
        return self.size * FULL_PIXELS / self.pixels


def pictures(content: Content, count: int) -> Iterator[NDArray[np.uint8]]:
    """Frames [HEIGHT, WIDTH, 3]: a textured scene under a moving camera, or noise; the same at each call."""
    draw = np.random.default_rng(0)
    coarse = draw.integers(0, 256, (HEIGHT // 8 + 64, WIDTH // 8 + 64, 3), np.uint8)
    scene = coarse.repeat(8, axis=0).repeat(8, axis=1)
    for number in range(count):
        if content == "noise":
            yield draw.integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
        else:
            down, right = 2 * number, 3 * number
            view = scene[down : down + HEIGHT, right : right + WIDTH]
            yield view // 2 + draw.integers(0, 24, view.shape, np.uint8)


@contextmanager
def own_schedule() -> Iterator[None]:
    """Keep this thread's schedule: SVT-AV1 makes one of root's real-time, and what it starts then starves the rest."""
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, priority)


def encode(codec: Codec, content: Content, count: int) -> bytes:
    """A file of `count` frames."""
    file = io.BytesIO()
    with own_schedule(), av.open(file, "w", format=codec.container) as out:
        stream = cast(VideoStream, out.add_stream(codec.encoder, rate=RATE, options=codec.options))
        stream.width, stream.height, stream.bit_rate = WIDTH, HEIGHT, BITS[content]
        stream.pix_fmt = "yuvj420p" if codec.encoder == "mjpeg" else "yuv420p"
        for picture in pictures(content, count):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        out.mux(stream.encode(None))
    return file.getvalue()


def decode(data: bytes) -> Cost:
    """Decode all frames of a file on one thread."""
    begin, pixels = time.process_time(), 0
    with av.open(io.BytesIO(data), "r") as source:
        stream = source.streams.video[0]
        stream.codec_context.thread_count = 1
        for frame in source.decode(stream):
            pixels += frame.width * frame.height
    return Cost(time.process_time() - begin, pixels, len(data))


def fitted(moving: Cost, noise: Cost) -> tuple[float, float]:
    """Seconds of a pixel and of a byte that give both costs."""
    counts = np.array([[moving.pixels, moving.size], [noise.pixels, noise.size]], np.float64)
    pixel_s, byte_s = np.linalg.solve(counts, np.array([moving.seconds, noise.seconds]))
    return float(pixel_s), float(byte_s)


def row(codec: Codec, count: int, repeats: int) -> list[str]:
    """The codec's line of the table; the least of `repeats` times counts, since other work only adds to them."""
    costs = []
    for content in BITS:
        data = encode(codec, content, count)
        costs.append(min((decode(data) for _ in range(repeats)), key=lambda cost: cost.seconds))
    limits = RequestLimits()
    pixel_s, byte_s = fitted(*costs)
    largest = limits.max_video_source_pixels * pixel_s + limits.max_media_bytes * byte_s
    told = [f"{cost.full_s:.0f} ({cost.full_bytes * 8e-6 / LENGTH_S:.0f} Mbit/s)" for cost in costs]
    return [codec.name, *told, f"{pixel_s * 1e9:.1f}", f"{byte_s * 1e9:.0f}", f"{largest:.0f}"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Measures what decoding a video costs, codec by codec.")
    parser.add_argument("--frames", type=int, default=60, help="frames of a clip (default 60)")
    parser.add_argument("--repeats", type=int, default=5, help="decodings of a clip (default 5)")
    given = parser.parse_args()
    os.environ.setdefault("SVT_LOG", "1")  # errors alone
    print(f"FFmpeg's libavcodec {'.'.join(map(str, av.library_versions['libavcodec']))}, PyAV {av.__version__}")
    installed = (codec for codec in CODECS if codec.encoder in av.codecs_available)
    head = ("codec", "moving pictures", "noise", "ns a pixel", "ns a byte", "largest video")
    for line in table(head, (row(codec, given.frames, given.repeats) for codec in installed)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
