# SPDX-License-Identifier: Apache-2.0
"""Number of cases that a property is tried with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, settings

LONG = "hostile-long"
LONG_SECONDS = 4 * 3600
"""Seconds of one property in a long run."""

TestT = TypeVar("TestT", bound=Callable[..., None])


def cases(seeded: int, long: int) -> Callable[[TestT], TestT]:
    """Try a property with the same `seeded` cases in every run, or with `long` new ones in a long run."""
    if settings.get_current_profile_name() == LONG:
        chosen = settings(max_examples=long, derandomize=False, print_blob=True)
    else:
        chosen = settings(max_examples=seeded, derandomize=True, database=None)
    return settings(chosen, deadline=None, suppress_health_check=list(HealthCheck))
