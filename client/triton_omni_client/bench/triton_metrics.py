# SPDX-License-Identifier: Apache-2.0
"""Reads Triton's metrics endpoint: GPUs as Triton sees them, and what each stage holds. Pure but for `fetch`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

FETCH_TIMEOUT_S = 2.0
MAX_PAGE_BYTES = 1 << 24

STAGE_GAUGES = ("sessions", "running", "waiting", "kv_blocks_used", "rows_used", "outbox")
"""Gauges that a stage publishes as `omni_*` with the label `stage`."""

_GPU = {
    "nv_gpu_utilization": ("utilization", 1.0),
    "nv_gpu_memory_used_bytes": ("memory_mib", 1 / 2**20),
}


def fetch(url: str) -> str:
    """The page of metrics.

    Raises:
        OSError: it cannot be had.
        ValueError: it has more than `MAX_PAGE_BYTES`.
    """
    with urlopen(url, timeout=FETCH_TIMEOUT_S) as response:
        page = bytes(response.read(MAX_PAGE_BYTES + 1))
    if len(page) > MAX_PAGE_BYTES:
        raise ValueError(f"the page has more than {MAX_PAGE_BYTES} bytes")
    return page.decode("utf-8", errors="replace")


def read(page: str) -> dict[str, float]:
    """The figures of one page by our name: `stage/thinker/sessions`, `gpu/<uuid>/memory_mib`, …

    Raises:
        ValueError: the page is not in Prometheus' text format.
    """
    found: dict[str, float] = {}
    for name, labels, value in samples(page):
        if name in _GPU and "gpu_uuid" in labels:
            figure, factor = _GPU[name]
            found[f"gpu/{labels['gpu_uuid']}/{figure}"] = value * factor
        elif name.startswith("omni_") and name.removeprefix("omni_") in STAGE_GAUGES and "stage" in labels:
            found[f"stage/{labels['stage']}/{name.removeprefix('omni_')}"] = value
    return found


def samples(page: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Name, labels and value of every sample of a page.

    Raises:
        ValueError: the page is not in Prometheus' text format.
    """
    for family in text_string_to_metric_families(page):
        yield from ((sample.name, sample.labels, sample.value) for sample in family.samples)
