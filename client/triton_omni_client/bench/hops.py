# SPDX-License-Identifier: Apache-2.0
"""How long messages between stages took during a run: the growth of the server's histograms of hops. Pure but for
`read_stages`.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from .counters import Counters, counted, parse_counters
from .statistics import samples_needed
from .triton_metrics import fetch, samples

SETTLE_S = 1.2
"""Until what has happened is on the metrics page: a stage publishes its hops once a second."""

_PREFIX = "omni_hop_seconds_"


@dataclass
class Histogram:
    """Messages so far: how many took at most so many seconds, by upper bound, and the seconds of all together."""

    buckets: dict[float, float] = field(default_factory=dict)
    sum_s: float = 0.0


@dataclass(frozen=True)
class HopTimes:
    """One hop during a run; percentiles are interpolated within buckets, None where too few or beyond the last."""

    messages: int
    mean_s: float | None = None
    p50_s: float | None = None
    p95_s: float | None = None


Hops = Mapping[tuple[str, str], Histogram]
"""By receiving stage and by what the hop ends with: `arrived` or `taken`."""


@dataclass(frozen=True)
class StageReading:
    """What the stages told at one moment."""

    hops: Hops
    counters: Counters


async def read_stages(metrics_url: str) -> StageReading | None:
    """The server's figures when all that has happened by now is in them; None where they cannot be had."""
    try:
        await asyncio.to_thread(fetch, metrics_url)
        await asyncio.sleep(SETTLE_S)
        page = await asyncio.to_thread(fetch, metrics_url)
        return StageReading(parse_hops(page), parse_counters(page))
    except (OSError, ValueError):
        return None


def parse_hops(page: str) -> Hops:
    """The histograms of a metrics page."""
    found: defaultdict[tuple[str, str], Histogram] = defaultdict(Histogram)
    for name, labels, value in samples(page):
        if not name.startswith(_PREFIX) or not {"stage", "until"} <= labels.keys():
            continue
        histogram = found[labels["stage"], labels["until"]]
        if name == _PREFIX + "bucket":
            histogram.buckets[float(labels["le"])] = value
        elif name == _PREFIX + "sum":
            histogram.sum_s = value
    return found


def grown(before: StageReading, after: StageReading) -> dict[str, Any]:
    """Return what a run's stages did between two readings: `hops` and `counters` of its report."""
    return {
        "hops": growth(before.hops, after.hops),
        "counters": counted(before.counters, after.counters),
    }


def growth(before: Hops, after: Hops) -> dict[str, dict[str, HopTimes]]:
    """Return the counts between two readings, by stage and by end, without stages that took no message."""
    found: defaultdict[str, dict[str, HopTimes]] = defaultdict(dict)
    for (stage, until), later in sorted(after.items()):
        earlier = before.get((stage, until), Histogram())
        new = {bound: count - earlier.buckets.get(bound, 0.0) for bound, count in sorted(later.buckets.items())}
        times = _times(new, later.sum_s - earlier.sum_s)
        if times.messages > 0:
            found[stage][until] = times
    return dict(found)


def _times(buckets: Mapping[float, float], sum_s: float) -> HopTimes:
    messages = round(buckets.get(math.inf, 0.0))
    if messages <= 0:
        return HopTimes(0)
    return HopTimes(messages, sum_s / messages, _percentile(buckets, messages, 50), _percentile(buckets, messages, 95))


def _percentile(buckets: Mapping[float, float], messages: int, percent: int) -> float | None:
    """Interpolate as PromQL's `histogram_quantile`: linearly within the bucket."""
    if messages < samples_needed(percent):
        return None
    rank = messages * percent / 100
    for (low, below), (high, within) in pairwise([(0.0, 0.0), *buckets.items()]):
        if within >= rank:
            return None if math.isinf(high) else low + (high - low) * (rank - below) / (within - below)
    return None
