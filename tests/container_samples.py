# SPDX-License-Identifier: Apache-2.0
"""Files of the kinds that may hold pictures or sound alone, as recorders and browsers write them."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

import av
import numpy as np

CODECS = {"mp4": ("aac", "h264"), "mov": ("aac", "h264"), "webm": ("libopus", "libvpx"), "matroska": ("aac", "h264")}
FRAGMENTED = {"movflags": "frag_keyframe+empty_moov"}
INDEX_FIRST = {"movflags": "faststart"}


class Pipe(io.RawIOBase):
    """Takes bytes as a pipe does: without a way back."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        self.data += bytes(data)  # type: ignore[call-overload]
        return len(self.data)


def made(
    container: str,
    *,
    sound: bool = True,
    pictures: bool = False,
    options: dict[str, str] | None = None,
    piped: bool = False,
) -> bytes:
    """Half a second of a tone, of a gray picture or of both."""
    with contextlib.ExitStack() as stack:
        pipe = Pipe()
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "file"
        file = stack.enter_context(av.open(pipe if piped else str(path), "w", format=container, options=options or {}))
        sounds, shown = CODECS[container]
        heard = file.add_stream(sounds, rate=48_000, layout="mono") if sound else None
        seen = file.add_stream(shown, rate=10, width=64, height=48, pix_fmt="yuv420p") if pictures else None
        if seen is not None:
            for _ in range(5):
                picture = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 128, np.uint8), format="rgb24")
                file.mux(seen.encode(picture))
            file.mux(seen.encode(None))
        if heard is not None:
            samples = (np.sin(np.arange(24_000) / 20)[None] * 9000).astype(np.int16)
            for begin in range(0, 24_000, 960):
                frame = av.AudioFrame.from_ndarray(samples[:, begin : begin + 960].copy(), format="s16", layout="mono")
                frame.sample_rate, frame.pts = 48_000, begin
                file.mux(heard.encode(frame))
            file.mux(heard.encode(None))
        file.close()
        return bytes(pipe.data) if piped else path.read_bytes()


SOUNDS = {
    "a voice memo (m4a)": made("mp4"),
    "its index first": made("mp4", options=INDEX_FIRST),
    "in fragments": made("mp4", options=FRAGMENTED),
    "QuickTime": made("mov"),
    "WebM": made("webm"),
    "WebM as a browser sends it": made("webm", piped=True),
    "Matroska": made("matroska"),
}
VIDEOS = {
    "mp4": made("mp4", pictures=True),
    "mp4, silent": made("mp4", sound=False, pictures=True),
    "mp4 in fragments": made("mp4", pictures=True, options=FRAGMENTED),
    "QuickTime": made("mov", pictures=True),
    "WebM": made("webm", pictures=True),
    "WebM, silent, as a browser sends it": made("webm", sound=False, pictures=True, piped=True),
    "Matroska": made("matroska", pictures=True),
}
