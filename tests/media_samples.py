# SPDX-License-Identifier: Apache-2.0
"""Small media files made in memory, for every test that needs one.

Knows the codecs' libraries only, nothing of the server.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import soundfile
from PIL import Image

_AUDIO_FORMATS = {"wav": ("WAV", "PCM_16"), "flac": ("FLAC", "PCM_16"), "ogg": ("OGG", "VORBIS"), "mp3": ("MP3", None)}


def tone(seconds: float = 0.5, rate: int = 16000, channels: int = 1, hertz: float = 440.0) -> np.ndarray:
    """A sine of amplitude 0.5: float32 [S] or [S, channels], each channel an octave above the one before."""
    time = np.arange(round(seconds * rate)) / rate
    waves = [0.5 * np.sin(2 * np.pi * hertz * 2**channel * time) for channel in range(channels)]
    samples = np.stack(waves, axis=1).astype(np.float32)
    return samples[:, 0] if channels == 1 else samples


def audio_file(
    kind: str = "wav",
    *,
    seconds: float = 0.5,
    rate: int = 16000,
    channels: int = 1,
    samples: np.ndarray | None = None,
    subtype: str | None = None,
) -> bytes:
    """An encoded wav, flac, ogg (Vorbis) or mp3; of `samples` or of `tone`."""
    container, default = _AUDIO_FORMATS[kind]
    out = io.BytesIO()
    wave = tone(seconds, rate, channels) if samples is None else samples
    soundfile.write(out, wave, rate, format=container, subtype=subtype or default)
    return out.getvalue()


def sweep(seconds: float = 6.0, rate: int = 44100, channels: int = 1) -> np.ndarray:
    """Rising tones that swell and fade: each moment sounds unlike any other. float32 [S] or [S, channels]."""
    time = np.arange(round(seconds * rate)) / rate
    tones = sum(np.sin(2 * np.pi * (200 * number + 20 * number * time) * time) for number in (1, 2, 3))
    wave = (0.15 * tones * (0.6 + 0.4 * np.sin(2 * np.pi * 0.7 * time))).astype(np.float32)
    return wave if channels == 1 else np.stack([wave * (1 - 0.3 * channel) for channel in range(channels)], axis=1)


def encoded_sound(
    container: str,
    codec: str,
    *,
    seconds: float = 6.0,
    rate: int = 44100,
    channels: int = 1,
    samples: np.ndarray | None = None,
    bit_rate: int | None = None,
    options: Mapping[str, str] | None = None,
    piped: bool = False,
) -> bytes:
    """`sweep`, or `samples`, encoded by FFmpeg, or by libsndfile if as Vorbis; `piped` = nothing is written twice."""
    out = io.BytesIO()
    layout = {1: "mono", 2: "stereo", 8: "7.1"}[channels]
    wave = sweep(seconds, rate, channels) if samples is None else samples
    if codec == "vorbis":
        return audio_file("ogg", samples=wave, rate=rate)
    with av.open(_Pipe(out) if piped else out, mode="w", format=container) as file:
        stream: Any = file.add_stream(codec, rate=rate, options=dict(options or {}))
        stream.layout = layout
        if bit_rate is not None:
            stream.bit_rate = bit_rate
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(wave.reshape(len(wave), -1).T), "fltp", layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        context = stream.codec_context
        context.open()
        cut = av.AudioResampler(context.format.name, layout, rate, context.frame_size or None)
        for piece in (*cut.resample(frame), *cut.resample(None)):
            file.mux(stream.encode(piece))
        file.mux(stream.encode(None))
    return out.getvalue()


class _Pipe:
    """A file that cannot be gone back in."""

    def __init__(self, file: io.BytesIO) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        return self._file.write(data)


def picture(width: int = 64, height: int = 48, seed: int = 0) -> np.ndarray:
    """A gradient with a bright square whose place depends on `seed`: uint8 [height, width, 3]."""
    rows, columns = np.mgrid[0:height, 0:width]
    pixels = np.stack([rows * 255 // max(height - 1, 1), columns * 255 // max(width - 1, 1), rows * 0 + 40], axis=2)
    left = (seed * 7) % max(width - 8, 1)
    pixels[: height // 4, left : left + 8] = 255
    return pixels.astype(np.uint8)


def image_file(kind: str = "png", width: int = 64, height: int = 48, seed: int = 0, **options: object) -> bytes:
    """An encoded png, jpeg or webp of `picture`; `options` go to Pillow's `save`."""
    return encode_image(Image.fromarray(picture(width, height, seed)), kind, **options)


def image_of(made: Mapping[str, Any]) -> Image.Image:
    """`picture` in a mode of Pillow's; one with transparency is half transparent."""
    image = Image.fromarray(picture(made["width"], made["height"]))
    if made.get("mode") == "RGBA":
        image.putalpha(128)
    return image.convert(made.get("mode", "RGB"))


def encode_image(image: Image.Image, kind: str, **options: object) -> bytes:
    """An encoded png, jpeg or webp of any Pillow image."""
    out = io.BytesIO()
    image.save(out, format=kind.upper(), **options)
    return out.getvalue()


def video_file(
    kind: str = "mp4",
    *,
    seconds: float = 1.0,
    fps: int | Fraction = 8,
    width: int = 64,
    height: int = 48,
    audio: bool = False,
    times: Sequence[float] | None = None,
) -> bytes:
    """An encoded mp4 (H.264, AAC) or webm (VP9, Opus); frame i is `picture(seed=i)`, the sound is `tone`.

    `times` are the seconds at which frames are shown, where their rate varies; the last one lasts until `seconds`.
    """
    out = io.BytesIO()
    with av.open(out, mode="w", format=kind) as container:
        stream = container.add_stream("libx264" if kind == "mp4" else "libvpx-vp9", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.thread_count = 1
        tick = Fraction(1, fps if times is None else 1000)
        if times is not None:
            stream.codec_context.time_base = tick
            stream.codec_context.max_b_frames = 0  # as cameras write; frames out of order lengthen such an mp4
        stamps = range(round(seconds * fps)) if times is None else [round(at / tick) for at in times]
        sound = _sound_stream(container, kind) if audio else None
        for index, stamp in enumerate(stamps):
            frame = av.VideoFrame.from_ndarray(picture(width, height, seed=index), format="rgb24")
            frame.pts, frame.time_base = stamp, tick
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if sound is not None:
            _write_sound(container, sound, seconds)
    return out.getvalue()


def video_of(made: Mapping[str, Any]) -> bytes:
    """`video_file` with arguments as JSON has them: the rate is a fraction in a string."""
    return video_file(**{**made, "fps": Fraction(made["fps"])})


def _sound_stream(container: av.container.OutputContainer, kind: str) -> av.AudioStream:
    stream = container.add_stream("aac" if kind == "mp4" else "libopus", rate=48000)
    stream.layout = "mono"
    return stream


def _write_sound(container: av.container.OutputContainer, stream: av.AudioStream, seconds: float) -> None:
    name = stream.codec_context.format.name  # which one libopus takes depends on the build
    samples = tone(seconds, 48000)[None, :]
    if name == "s16":
        samples = (samples * 32767).astype(np.int16)
    size = stream.frame_size or 960
    for start in range(0, samples.shape[1], size):
        block = np.ascontiguousarray(samples[:, start : start + size])
        frame = av.AudioFrame.from_ndarray(block, format=name, layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = 48000, start, Fraction(1, 48000)
        container.mux(stream.encode(frame))
    container.mux(stream.encode(None))


def media_files(folder: Path) -> list[Path]:
    """An image, a sound and a video in `folder`."""
    contents = {
        "picture.png": image_file("png", 112, 84),
        "sound.flac": audio_file("flac", seconds=1.0),
        "film.mp4": video_file("mp4", seconds=1.0),
    }
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in contents]
