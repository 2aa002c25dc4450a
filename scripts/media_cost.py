# SPDX-License-Identifier: Apache-2.0
"""Measures how long a request with media takes to prepare on a CPU, the first time and again by the media cache.

    python scripts/media_cost.py [CHECKPOINT]

The checkpoint is the tiny one unless another is given; its decoder plays no part. Each medium comes `TIMES` times,
without a salt (decoded and processed) and with one (found). Figures are medians.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import soundfile  # type: ignore[import-untyped]
import torch
from markdown_table import table
from PIL import Image, ImageFilter

from triton_omni.checkpoint.config import load_config
from triton_omni.checkpoint.speakers import load_speakers
from triton_omni.checkpoint.synthetic import ensure_checkpoint
from triton_omni.core.settings import EngineSettings, ThinkerSettings
from triton_omni.request.chat import MediaPart
from triton_omni.request.media.decoders import Decoders
from triton_omni.request.parse import RawRequest
from triton_omni.thinker.preprocessing import Preprocessor
from triton_omni.vllm_hooks.thinker.engine import ThinkerVllmEngine

TIMES = 21
SALT = "a caller"


def photo() -> bytes:
    """A JPEG of 1024 x 768 with as much detail as a photo has, some 200 KB."""
    noise = np.random.default_rng(0).integers(0, 256, (768, 1024, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).filter(ImageFilter.GaussianBlur(2)).save(out, "JPEG", quality=90)
    return out.getvalue()


def sound() -> bytes:
    """Ten seconds of noise at 16 kHz, as wav."""
    out = io.BytesIO()
    soundfile.write(out, np.random.default_rng(0).normal(0, 0.1, 160_000), 16_000, format="WAV")
    return out.getvalue()


def median_ms(work: Callable[[], object]) -> float:
    """Return the median of `TIMES` calls, after one."""
    work()
    times = []
    for _ in range(TIMES):
        begin = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times)


def measure(preprocessor: Preprocessor, decoders: Decoders, media: Mapping[str, MediaPart]) -> None:
    """Print a line for each medium."""
    head = ("medium", "bytes", "decoding, ms", "preprocessed anew, ms", "found, ms", "kept, MB")
    for line in table(head, _measured(preprocessor, decoders, media)):
        print(line, flush=True)


def _measured(
    preprocessor: Preprocessor, decoders: Decoders, media: Mapping[str, MediaPart]
) -> Iterator[tuple[str, ...]]:
    for name, part in media.items():
        decoding = median_ms(lambda: decoders.decode([part], with_audio=False, is_wanted=lambda: True))  # noqa: B023
        anew = median_ms(lambda: preprocessor.preprocess(_asking(part), 0))  # noqa: B023
        before = _kept_bytes(preprocessor)
        found = median_ms(lambda: preprocessor.preprocess(_asking(part, cache_salt=SALT), 0))  # noqa: B023
        kept = (_kept_bytes(preprocessor) - before) / 1e6
        yield name, str(len(part.data)), f"{decoding:.1f}", f"{anew:.1f}", f"{found:.2f}", f"{kept:.2f}"


def _kept_bytes(preprocessor: Preprocessor) -> float:
    return next(metric.value for metric in preprocessor.metrics() if metric.name == "omni_media_cache_bytes")


def _asking(part: MediaPart, **parameters: str) -> RawRequest:
    content = [{"type": part.kind}, {"type": "text", "text": "What is this?"}]
    return RawRequest(
        messages=json.dumps([{"role": "user", "content": content}]).encode(),
        media=(part.data,),
        sampling_parameters=json.dumps(parameters).encode(),
    )


def main() -> None:
    """Measure a photo and a sound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", help="folder of a checkpoint")
    checkpoint = parser.parse_args().checkpoint or ensure_checkpoint()
    settings = ThinkerSettings(dtype="float32", engine=EngineSettings(max_num_seqs=4, max_model_len=4096))
    engine = ThinkerVllmEngine(checkpoint, settings, torch.device("cpu"))
    config = load_config(checkpoint)
    preprocessor = Preprocessor(checkpoint, config, load_speakers(checkpoint, config), settings, engine)
    decoders = Decoders(settings.limits)
    media = {"photo of 1024 x 768": MediaPart("image", photo()), "10 s of sound": MediaPart("audio", sound())}
    try:
        measure(preprocessor, decoders, media)
    finally:
        decoders.close()
        preprocessor.close()
        engine.close()


if __name__ == "__main__":
    main()
