# SPDX-License-Identifier: Apache-2.0
"""Triton's metrics endpoint as others read it: a page in Prometheus' text form."""

from __future__ import annotations

from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

_FETCH_TIMEOUT_S = 5.0


class MetricsPage:
    """The samples of one page.

    Raises:
        ValueError: the text is none.
    """

    def __init__(self, text: str) -> None:
        families = text_string_to_metric_families(text)
        self._samples = [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]

    @property
    def names(self) -> frozenset[str]:
        """Names of all samples."""
        return frozenset(name for name, _, _ in self._samples)

    def value(self, name: str, **labels: str) -> float | None:
        """The sum of all samples of this name with at least these labels; None = there is none."""
        found = [value for own, has, value in self._samples if own == name and labels.items() <= has.items()]
        return sum(found) if found else None


def fetch_page(url: str) -> MetricsPage:
    """The page at `url`.

    Raises:
        OSError: nobody answers there.
        ValueError: it is no page of metrics.
    """
    with urlopen(url, timeout=_FETCH_TIMEOUT_S) as answer:
        return MetricsPage(answer.read().decode("utf-8", errors="replace"))
