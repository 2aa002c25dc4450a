# SPDX-License-Identifier: Apache-2.0
"""What the stages counted during a run: the growth of their counters on the metrics page. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from .triton_metrics import samples

Counters = Mapping[str, Mapping[str, float]]
"""By stage, and by the counter's name without `omni_` and `_total`, with its labels' values: `loop_seconds/claim`."""
_NUMBER_AND_SUM = tuple(f"{name}_{end}" for name in ("batch_size", "window_seconds") for end in ("count", "sum"))


def parse_counters(page: str) -> Counters:
    """The counters of a metrics page, and number and sum of batches and of windows.

    Raises:
        ValueError: the page is not in Prometheus' text format.
    """
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for name, labels, value in samples(page):
        kept = name.removeprefix("omni_")
        if kept == name or "stage" not in labels or not (kept.endswith("_total") or kept in _NUMBER_AND_SUM):
            continue
        values = [text for label, text in sorted(labels.items()) if label != "stage"]
        found[labels["stage"]]["/".join([kept.removesuffix("_total"), *values])] = value
    return found


def counted(before: Counters, after: Counters) -> dict[str, dict[str, float]]:
    """What was counted between two readings, without counters that stood still."""
    grown = {
        stage: {name: value - before.get(stage, {}).get(name, 0.0) for name, value in sorted(later.items())}
        for stage, later in sorted(after.items())
    }
    return {stage: {name: value for name, value in names.items() if value > 0} for stage, names in grown.items()}
