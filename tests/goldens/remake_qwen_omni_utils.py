# SPDX-License-Identifier: Apache-2.0
"""Writes qwen_omni_utils.json: what the package of the model card's recipe makes of a table of media.

Run it in an environment of its own, which this project does not need otherwise:

    python -m venv recipe
    recipe/bin/pip install 'qwen-omni-utils[decord]==0.0.9' torch torchvision imageio-ffmpeg==0.6.0
    PYTHONPATH=tests:backend_src recipe/bin/python tests/goldens/remake_qwen_omni_utils.py
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import torch

import media_samples as samples
from triton_omni.checkpoint.transformers_setup import prepare_transformers

RATES = (1, 2, 5, 7.5, 8, 10, 12, 15, 24000 / 1001, 24, 25, 30000 / 1001, 30, 48, 50, 60000 / 1001, 60)
DURATIONS = (0.5, 1, 1.5, 2, 2.9, 3, 5, 10, 29.97, 30, 61.3, 120)
SIDES = (10, 27, 28, 29, 41, 42, 63, 100, 255, 479, 480, 641, 720, 1079, 1280, 1920, 2160, 3840, 4000)
VIDEOS = (
    {"fps": "30", "seconds": 2},
    {"fps": "30000/1001", "seconds": 5},
    {"fps": "24000/1001", "seconds": 3, "width": 98, "height": 54},
    {"fps": "60", "seconds": 1, "width": 64, "height": 96},
    {"fps": "1", "seconds": 6},
    {"fps": "8", "seconds": 0.5},
    {"fps": "2", "seconds": 1.5},
    {"fps": "25", "seconds": 3, "kind": "webm"},
)
SHARED = tuple({"fps": "2", "seconds": 4, "width": 640, "height": height} for height in (480, 90))
SOUNDS = tuple(
    {"rate": rate, "channels": channels, "seconds": 0.403, "kind": kind}
    for rate, channels, kind in (*product((8000, 16000, 24000, 44100, 48000), (1, 2), ("wav",)), (48000, 2, "flac"))
)
LONG_SOUNDS = (
    {"container": "mp3", "codec": "libmp3lame", "options": {"q:a": "4"}},
    {"container": "mp3", "codec": "libmp3lame", "rate": 48000, "bit_rate": 128000, "options": {"abr": "1"}},
    {"container": "mp3", "codec": "libmp3lame", "rate": 16000, "bit_rate": 16000},
    {"container": "mp3", "codec": "libmp3lame", "rate": 8000, "channels": 2, "bit_rate": 8000},
    {"container": "mp3", "codec": "libmp3lame", "bit_rate": 64000, "piped": True},
    {"container": "flac", "codec": "flac", "channels": 2},
    {"container": "ogg", "codec": "libopus", "rate": 48000, "channels": 2},
    {"container": "ogg", "codec": "vorbis", "rate": 22050},
    {"container": "wav", "codec": "pcm_s24le", "rate": 48000, "channels": 2},
    {"container": "wav", "codec": "adpcm_ms", "rate": 11025},
)
IMAGES = (
    {"width": 100, "height": 70},
    {"width": 10, "height": 13},
    {"width": 641, "height": 31},
    {"width": 57, "height": 56, "mode": "L"},
    {"width": 57, "height": 56, "mode": "RGBA"},
)


def recipe() -> Any:
    """The package, which a CPU build of torch beside PyPI's torchvision would not import."""
    prepare_transformers()
    from qwen_omni_utils import v2_5

    return v2_5


def frame_counts() -> Iterator[list[Any]]:
    """Frames of the file, its rate, the most that may be taken, and how many are (null: refused)."""
    lengths = [(round(rate * seconds), rate) for rate, seconds in product(RATES, DURATIONS)]
    cases = [(total, rate, 768) for total, rate in lengths]
    cases += [(30 * 500, 30, 768), (300, 30, 8), (300, 30, 7), (20, 30, 256), (5, 1, 4), (7, 60, 768)]
    for total, rate, most in dict.fromkeys(cases):
        try:
            yield [
                total,
                rate,
                most,
                recipe().vision_process.smart_nframes({"max_frames": min(most, total)}, total, rate),
            ]
        except ValueError:
            yield [total, rate, most, None]


def sizes(low: int, high: int) -> Iterator[list[Any]]:
    """Height and width, and what they become (null: refused) between so many pixels and so many."""
    others = [(20, 4000), (20, 4001), (4000, 20), (8000, 41), (100, 20000), (6000, 6000)]
    for height, width in [*product(SIDES, SIDES), *others]:
        if (height * 7 + width) % 5 and (height, width) not in others:
            continue  # a fifth of them will do
        try:
            yield [height, width, recipe().smart_resize(height, width, 28, low, high)]
        except ValueError:
            yield [height, width, None]


def grid(pixels: np.ndarray) -> list[float]:
    """Means of the four quarters of a picture [H, W, 3], by colour."""
    height, width = (side // 2 for side in pixels.shape[:2])
    quarters = [pixels[top:, left:][:height, :width] for top in (0, height) for left in (0, width)]
    return [round(float(mean), 2) for quarter in quarters for mean in quarter.mean(axis=(0, 1))]


def videos(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the frames that are taken of each video: their rate, size and look."""
    for made in VIDEOS:
        path = folder / "film"
        path.write_bytes(samples.video_of(made))
        (frames, metadata), fps = recipe().fetch_video(
            {"video": str(path)}, return_video_sample_fps=True, return_video_metadata=True
        )
        pictures = frames.permute(0, 2, 3, 1).numpy()
        yield {
            "made": made,
            "frames": [int(index) for index in metadata["frames_indices"]],
            "fps": fps,
            "size": list(pictures.shape[1:3]),
            "grids": [grid(picture) for picture in pictures],
        }


def shared_pixels(folder: Path) -> Iterator[dict[str, Any]]:
    """The size of frames that share fewer pixels than each could have."""
    path = folder / "film.mp4"
    for made, total in product(SHARED, (300_000, 600_000, 10_000_000)):
        path.write_bytes(samples.video_of(made))
        frames = recipe().fetch_video({"video": str(path), "total_pixels": total})
        yield {"made": made, "total_pixels": total, "size": list(frames.shape[2:])}


def images() -> Iterator[dict[str, Any]]:
    """Yield each picture's result and its look."""
    for made in IMAGES:
        pixels = np.asarray(recipe().fetch_image({"image": samples.image_of(made)}))
        yield {"made": made, "size": list(pixels.shape[:2]), "grid": grid(pixels)}


def heard(kind: str, path: Path, step: int = 53) -> dict[str, Any]:
    """A sound's length, and each `step`th of its samples."""
    chat = [{"role": "user", "content": [{"type": kind, kind: str(path)}]}]
    (sound,) = recipe().process_audio_info(chat, use_audio_in_video=True)
    return {"length": len(sound), "samples": [round(float(sample), 5) for sample in sound[::step]]}


def sounds(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the results of sound files."""
    for made in SOUNDS:
        path = folder / "sound"
        path.write_bytes(samples.audio_file(**made))
        yield {"made": made, **heard("audio", path)}


def long_sounds(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the results of compressed files of several seconds."""
    for made in LONG_SOUNDS:
        path = folder / "sound"
        path.write_bytes(samples.encoded_sound(**made))
        yield {"made": made, **heard("audio", path, 499)}


def sounds_of_videos(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the results of the videos' sound."""
    for kind in ("mp4", "webm"):
        made = {"fps": "8", "seconds": 1, "kind": kind, "audio": True}
        path = folder / f"film.{kind}"
        path.write_bytes(samples.video_of(made))
        yield {"made": made, **heard("video", path)}


def with_ffmpeg(folder: Path) -> None:
    """The package asks ffmpeg's program for the sound of a video."""
    (folder / "ffmpeg").symlink_to(imageio_ffmpeg.get_ffmpeg_exe())
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def main() -> None:
    """Write the file: one case a line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with_ffmpeg(folder)
        tables = {
            "frame_counts": frame_counts(),
            "image_sizes": sizes(4 * 28 * 28, 16384 * 28 * 28),
            "frame_sizes": sizes(128 * 28 * 28, 768 * 28 * 28),
            "images": images(),
            "videos": videos(folder),
            "shared_pixels": shared_pixels(folder),
            "sounds": sounds(folder),
            "long_sounds": long_sounds(folder),
            "sounds_of_videos": sounds_of_videos(folder),
        }
        head = {name: version(name) for name in ("qwen-omni-utils", "decord", "av", "librosa", "pillow")}
        parts = [f' "versions": {json.dumps({**head, "torch": torch.__version__})}']
        for table, rows in tables.items():
            lines = ",\n  ".join(json.dumps(row) for row in rows)
            parts.append(f' "{table}": [\n  {lines}\n ]')
    Path(__file__).with_name("qwen_omni_utils.json").write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main()
