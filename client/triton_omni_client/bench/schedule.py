# SPDX-License-Identifier: Apache-2.0
"""When the requests of an open loop arrive. Pure and seeded: the same seed gives the same arrivals."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Endless arrival times of a Poisson process, in seconds after its begin.

    Args:
        rate: arrivals a second, on average; the times between them are exponential with mean 1 / rate.
        seed: of NumPy's PCG64 generator.

    Raises:
        ValueError: the rate is not a positive number.
    """
    if not 0 < rate < float("inf"):
        raise ValueError(f"rate {rate} is not a positive number of requests a second")
    random = np.random.Generator(np.random.PCG64(seed))
    return itertools.accumulate(float(random.exponential(1 / rate)) for _ in itertools.count())
