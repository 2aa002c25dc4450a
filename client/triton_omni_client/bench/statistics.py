# SPDX-License-Identifier: Apache-2.0
"""Distributions of figures: mean, extremes and percentiles, none claimed of too few samples.

Percentiles interpolate linearly between the two nearest ranks (NumPy's `linear`, Hyndman and Fan's type 7).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Distribution:
    """Samples of one figure, summed up; None where there are too few to say."""

    count: int
    mean: float | None = None
    min: float | None = None
    max: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None


def samples_needed(percent: int) -> int:
    """The fewest samples of which one is expected beyond the percentile: 2, 10, 20 and 100 for p50 to p99."""
    return math.ceil(100 / (100 - percent))


def percentile(samples: Sequence[float], percent: int) -> float | None:
    """The percentile, or None of fewer than `samples_needed`."""
    if len(samples) < samples_needed(percent):
        return None
    return float(np.percentile(samples, percent, method="linear"))


def distribution(samples: Iterable[float | None]) -> Distribution:
    """The distribution of what was measured; None, for what a request has no figure of, is left out."""
    found = [sample for sample in samples if sample is not None]
    if not found:
        return Distribution(0)
    percentiles = {f"p{percent}": percentile(found, percent) for percent in PERCENTILES}
    return Distribution(len(found), float(np.mean(found)), min(found), max(found), **percentiles)
