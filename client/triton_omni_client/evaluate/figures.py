# SPDX-License-Identifier: Apache-2.0
"""Figures of many replies: ratios of sums, with intervals by bootstrap over the replies. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

RESAMPLES: Final = 2000
CONFIDENCE: Final = 0.95
_SEED: Final = 0


class Kind(NamedTuple):
    """Title and unit of a figure."""

    title: str
    unit: str
    factor: float = 1.0
    """Factor from the ratio of sums to the unit."""


PERCENT = ("%", 100.0)
KINDS: Final[Mapping[str, Kind]] = {
    "word_errors": Kind("word errors", *PERCENT),
    "text_errors": Kind("text errors", *PERCENT),
    "skipped_words": Kind("skipped words", *PERCENT),
    "repeated_words": Kind("repeated words", *PERCENT),
    "whole_replies": Kind("whole replies", *PERCENT),
    "mel_distance": Kind("mel distance", "dB"),
    "snr": Kind("SNR", "dB"),
    "boundary_excess": Kind("boundary energy", "dB"),
    "clicks": Kind("clicking boundaries", *PERCENT),
    "reference_clicks": Kind("clicks there in the reference", *PERCENT),
    "clipped": Kind("clipped samples", *PERCENT),
    "silence": Kind("silence", *PERCENT),
    "longest_pause": Kind("longest pause", "s"),
    "words_per_s": Kind("speaking rate", "words/s"),
    "right_voices": Kind("voices told apart", *PERCENT),
    "voice_distance": Kind("distance to own voice", "dB"),
    "pictures": Kind("pictures understood", *PERCENT),
    "sounds": Kind("sounds understood", *PERCENT),
}
"""By name, in the order of tables. `word_errors` compare speech with its text, `text_errors` that with the sentence.
`reference_clicks` are what the places of boundaries show without boundaries."""


class Share(NamedTuple):
    """Part that one reply adds to a figure: the figure is the sum of values over the sum of weights."""

    value: float
    weight: float = 1.0


@dataclass(frozen=True)
class Interval:
    """A figure in its unit with its 95 % interval; a single reply has none."""

    value: float
    low: float | None
    high: float | None
    count: int
    """Number of replies with a share of the figure."""

    @property
    def apart(self) -> bool:
        """True if 0 is outside; a difference then tells two settings apart."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def figure(name: str, shares: Sequence[Share]) -> Interval | None:
    """Return the figure of these shares; None if the sum of weights is 0."""
    table = np.array(shares, dtype=np.float64).reshape(-1, 2)
    if not table[:, 1].sum():
        return None
    return _interval(_ratio(table), _resampled([table])[0], KINDS[name].factor, len(table))


def difference(name: str, shares: Sequence[Share], references: Sequence[Share]) -> Interval | None:
    """Return a figure minus the reference's. Both shares of a request are resampled together."""
    tables = [np.array(each, dtype=np.float64).reshape(-1, 2) for each in (shares, references)]
    if not all(table[:, 1].sum() for table in tables):
        return None
    found, reference = _resampled(tables)
    return _interval(_ratio(tables[0]) - _ratio(tables[1]), found - reference, KINDS[name].factor, len(shares))


def _ratio(table: Array) -> float:
    return float(table[:, 0].sum() / table[:, 1].sum())


def _resampled(tables: Sequence[Array]) -> list[Array]:
    """Return the ratio of each table over the same resamples of rows [R]; NaN if a resample has no weight."""
    count = len(tables[0])
    picked = np.random.default_rng(_SEED).integers(0, count, (RESAMPLES, count))
    with np.errstate(invalid="ignore", divide="ignore"):
        return [table[picked, 0].sum(1) / table[picked, 1].sum(1) for table in tables]


def _interval(value: float, resampled: Array, factor: float, count: int) -> Interval:
    tail = 100 * (1 - CONFIDENCE) / 2
    found = resampled[np.isfinite(resampled)]
    if count < 2 or not len(found):
        return Interval(value * factor, None, None, count)
    low, high = np.percentile(found, [tail, 100 - tail]) * factor
    return Interval(value * factor, float(low), float(high), count)
