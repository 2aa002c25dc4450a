# SPDX-License-Identifier: Apache-2.0
"""Allocates contiguous spans of a pool (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class FirstFit:
    """Contiguous spans of `capacity` places; the first gap that is large enough is taken."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._spans: dict[int, int] = {}

    @property
    def used(self) -> int:
        """Places taken now."""
        return sum(self._spans.values())

    def allocate(self, count: int, *, avoid: Iterable[range] = ()) -> int | None:
        """First place of a span of `count`, or None where no gap beside `avoid` is large enough."""
        for start, end in self._gaps(avoid):
            if end - start >= count:
                self._spans[start] = count
                return start
        return None

    def free(self, start: int) -> None:
        """Free the span that `allocate` returned."""
        del self._spans[start]

    def _gaps(self, avoid: Iterable[range]) -> Iterator[tuple[int, int]]:
        taken = [(base, base + count) for base, count in self._spans.items()]
        start = 0
        for base, end in sorted([*taken, *((places.start, places.stop) for places in avoid)]):
            yield start, base
            # An avoided range may overlap a taken one.
            start = max(start, end)
        yield start, self.capacity
