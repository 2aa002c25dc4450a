# SPDX-License-Identifier: Apache-2.0
"""Measures of a waveform: float32 [S] in [-1, 1], mono, 24 kHz. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from triton_omni_client.audio import SAMPLE_RATE, Waveform

Array = NDArray[np.float64]

FULL_SCALE: Final = 1 - 2**-15
"""A sample of this level or more is clipped: PCM16 has no larger one."""
MAX_SNR_DB: Final = 120.0
"""Ratio of equal waveforms, in place of infinity."""
_FFT, _HOP, _BANDS = 1024, 240, 80
_RANGE_DB = 60.0
"""Range below the loudest band of the reference that is heard."""
_SILENT_DB = 40.0
"""A frame so far below a reply's loud level is silent."""
_FRAME = SAMPLE_RATE // 100
_TINY = 1e-12
_BESIDE = SAMPLE_RATE // 100
"""Samples on each side of a place that are its neighbourhood."""
_CLICK = 2
"""Samples on each side of a boundary in which its click may lie."""


def mel_db(samples: Waveform) -> Array:
    """Return the mel spectrogram in decibels [F, 80]: windows of 43 ms every 10 ms; F is 0 below one window."""
    if len(samples) < _FFT:
        return np.empty((0, _BANDS))
    frames = np.lib.stride_tricks.sliding_window_view(samples.astype(np.float64), _FFT)[::_HOP]
    power = np.abs(np.fft.rfft(frames * np.hanning(_FFT), axis=1)) ** 2
    decibel: Array = 10 * np.log10(power @ _filters() + _TINY)
    return decibel


@cache
def _filters() -> Array:
    """Return triangles [513, 80] of equal width on HTK's mel scale, 0 Hz to 12 kHz."""
    top = 2595 * np.log10(1 + SAMPLE_RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, _BANDS + 2) / 2595) - 1)
    bins = np.fft.rfftfreq(_FFT, 1 / SAMPLE_RATE)[:, None]
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    filters: Array = np.clip(np.minimum((bins - low) / (middle - low), (high - bins) / (high - middle)), 0, None)
    return filters


def mel_distance_db(reference: Waveform, reply: Waveform) -> float | None:
    """Return the mean difference of two mel spectrograms in decibels, over the bands in which one of them is heard.

    Waveforms of other codes have other lengths, and then it is None.
    """
    if len(reference) != len(reply) or len(reply) < _FFT:
        return None
    wanted, found = mel_db(reference), mel_db(reply)
    floor = wanted.max() - _RANGE_DB
    distance = np.abs(np.maximum(wanted, floor) - np.maximum(found, floor))
    return float(distance[np.maximum(wanted, found) > floor].mean())


def snr_db(reference: Waveform, reply: Waveform) -> float | None:
    """Return the power of the reference over that of the difference, in decibels; None if the lengths differ."""
    if len(reference) != len(reply) or not np.any(reference):
        return None
    signal, noise = np.sum(np.square(reference, dtype=np.float64)), np.sum((reference.astype(np.float64) - reply) ** 2)
    return float(min(MAX_SNR_DB, 10 * np.log10(signal / (noise + _TINY * signal))))


def clipped(samples: Waveform) -> int:
    """Return the number of samples at full scale."""
    return int(np.count_nonzero(np.abs(samples) >= FULL_SCALE))


@dataclass(frozen=True)
class Silences:
    """Seconds of silence in a reply."""

    before: float
    after: float
    longest: float
    """The longest pause between two sounds."""
    total: float


def silences(samples: Waveform) -> Silences:
    """Return the silences of a reply: frames of 10 ms, 40 dB below its loud ones. A silent reply is all `before`."""
    frames = samples[: len(samples) // _FRAME * _FRAME].astype(np.float64).reshape(-1, _FRAME)
    level = 10 * np.log10(np.mean(frames**2, axis=1) + _TINY)
    heard = np.flatnonzero(level > np.percentile(level, 95) - _SILENT_DB) if np.any(frames) else np.empty(0, int)
    if not len(heard):
        seconds = len(samples) / SAMPLE_RATE
        return Silences(seconds, 0.0, 0.0, seconds)
    second = _FRAME / SAMPLE_RATE
    pauses = np.diff(heard) - 1
    before, after = heard[0] * second, (len(level) - 1 - heard[-1]) * second
    longest = float(pauses.max(initial=0)) * second
    return Silences(float(before), float(after), longest, (len(level) - len(heard)) * second)


@dataclass(frozen=True)
class Boundaries:
    """Chunk boundaries of a reply beside its other places."""

    count: int
    clicks: int
    """Boundaries that stand out from their neighbourhood more than 99 % of the other places."""
    excess_db: float
    """Energy of the second difference at boundaries over that elsewhere; each is relative to its neighbourhood."""


def boundary_clicks(samples: Waveform, boundaries: Sequence[int]) -> Boundaries | None:
    """Compare chunk boundaries (numbers of samples before them) with other places; None without a boundary."""
    curve: Array = np.square(np.diff(samples.astype(np.float64), 2))
    inside = [at for at in boundaries if _BESIDE <= at < len(curve) - _BESIDE]
    if not inside:
        return None
    # On the grid of the boundaries: a vocoder's energy repeats with its frames.
    elsewhere = np.arange(_BESIDE + inside[0] % _HOP, len(curve) - _BESIDE, _HOP)
    for at in inside:
        elsewhere = elsewhere[np.abs(elsewhere - at) > _BESIDE]
    if not len(elsewhere):
        return None
    found, usual = _prominence(curve, np.array(inside)), _prominence(curve, elsewhere)
    clicks = int(np.count_nonzero(found > np.percentile(usual, 99)))
    return Boundaries(len(inside), clicks, float(10 * np.log10((found.mean() + _TINY) / (usual.mean() + _TINY))))


def _prominence(curve: Array, places: NDArray[np.int_]) -> Array:
    """Return the largest value within `_CLICK` of each place over the mean of its neighbourhood."""
    around = np.arange(-_CLICK - 1, _CLICK)  # a step between two samples is in the second differences before it
    beside = np.arange(-_BESIDE, _BESIDE)
    prominence: Array = curve[places[:, None] + around].max(1) / (curve[places[:, None] + beside].mean(1) + _TINY)
    return prominence


def voice_of(samples: Waveform) -> Array | None:
    """Return mel statistics [160] of loud frames in decibels: mean without level, deviation. None without a frame."""
    frames = mel_db(samples)
    if not len(frames):
        return None
    level = frames.max(1)
    loud = frames[level > level.max() - _SILENT_DB]
    mean = loud.mean(0)
    statistics: Array = np.concatenate([mean - mean.mean(), loud.std(0)])
    return statistics


def voice_distance_db(one: Array, other: Array) -> float:
    """Return the root mean square difference of the statistics of two voices."""
    return float(np.sqrt(np.mean((one - other) ** 2)))
