# SPDX-License-Identifier: Apache-2.0
"""Sound files to mono float32 at 16 kHz, as the model card's recipe does (librosa: mean of channels, soxr HQ).

Knows libsndfile and soxr; the sound of a video comes from `video.py` and is finished here.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator

import numpy as np
import soundfile  # type: ignore[import-untyped]
import soxr  # type: ignore[import-untyped]
from numpy.typing import NDArray

from triton_omni.errors import BadRequest, TooLarge
from triton_omni.media.types import SAMPLE_RATE, Audio
from triton_omni.settings import RequestLimits

MAX_CHANNELS = 8
MAX_RATE = 192_000
MIN_SAMPLES = 480
"""Three mel frames: with fewer the audio encoder has no output position."""


def decode_audio(data: bytes, limits: RequestLimits) -> Audio:
    """Decode a wav, mp3, flac or ogg file.

    Raises:
        BadRequest: unreadable, truncated to nothing, too short, not finite, or of an unsupported rate.
        TooLarge: longer than `limits.max_audio_seconds`, found after decoding at most a second more.
    """
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            check_format(file.samplerate, file.channels)
            return finish_audio(_blocks(file), file.samplerate, limits.max_audio_seconds)
    except soundfile.LibsndfileError as error:
        # Its own text would name the object that the file was read from.
        raise BadRequest(f"unreadable audio: {error.error_string}") from error


def check_format(rate: int, channels: int) -> None:
    """Refuse what would cost far more memory than its seconds suggest."""
    if not 1 <= rate <= MAX_RATE:
        raise BadRequest(f"sample rate {rate} Hz is outside of 1 to {MAX_RATE}")
    if not 1 <= channels <= MAX_CHANNELS:
        raise BadRequest(f"{channels} channels, allowed are 1 to {MAX_CHANNELS}")


def _blocks(file: soundfile.SoundFile) -> Iterator[NDArray[np.float32]]:
    """[n, channels] blocks of at most a second, up to the true end of the data."""
    while len(block := file.read(file.samplerate, dtype="float32", always_2d=True)):
        yield block


def finish_audio(blocks: Iterable[NDArray[np.float32]], rate: int, max_seconds: float) -> Audio:
    """Mix [n, channels] blocks of `rate` down to mono and resample them to 16 kHz.

    Raises:
        BadRequest: too short, or not finite.
        TooLarge: longer than `max_seconds`.
    """
    mono: list[NDArray[np.float32]] = []
    length, limit = 0, max_seconds * rate
    for block in blocks:
        length += len(block)
        if length > limit:
            raise TooLarge(f"longer than {max_seconds:g} seconds, the limit of this deployment")
        mono.append(block.mean(axis=1, dtype=np.float32))
    wave = np.concatenate(mono) if mono else np.zeros(0, np.float32)
    if not np.isfinite(wave).all():
        raise BadRequest("holds samples that are not finite numbers")
    samples = _resample(wave, rate)
    if len(samples) < MIN_SAMPLES:
        raise BadRequest(f"{len(samples)} samples at 16 kHz, at least {MIN_SAMPLES} (30 ms) are needed")
    return Audio(samples)


def _resample(wave: NDArray[np.float32], rate: int) -> NDArray[np.float32]:
    """librosa's `resample`: soxr HQ, then exactly ceil(n * 16000 / rate) samples."""
    if rate == SAMPLE_RATE or not len(wave):
        return wave
    length = math.ceil(len(wave) * SAMPLE_RATE / rate)
    out = np.asarray(soxr.resample(wave, rate, SAMPLE_RATE, quality="HQ"), dtype=np.float32)[:length]
    return np.pad(out, (0, length - len(out)))
