# SPDX-License-Identifier: Apache-2.0
"""Bounds that the figures of a server must keep to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .figures import KINDS
from .judging import Judgement


class Bound(NamedTuple):
    """Maximum or minimum of a figure, in its unit."""

    figure: str
    limit: float
    is_most: bool


@dataclass(frozen=True)
class Checked:
    """A bound beside the figure of one setting."""

    setting: str
    figure: str
    limit: float
    is_most: bool
    value: float | None
    """None = not measured; the bound counts as missed."""

    @property
    def met(self) -> bool:
        """True if the figure keeps to the bound."""
        if self.value is None:
            return False
        return self.value <= self.limit if self.is_most else self.value >= self.limit

    def sentence(self) -> str:
        """Return the figure and the bound in one sentence."""
        kind = KINDS[self.figure]
        found = "not measured" if self.value is None else f"{self.value:.3g} {kind.unit}"
        wanted = f"{'at most' if self.is_most else 'at least'} {self.limit:g} {kind.unit}"
        return f"{self.setting}: {kind.title}: {found}, wanted {wanted}"


def check(bounds: Sequence[Bound], judgements: Sequence[Judgement]) -> list[Checked]:
    """Compare each bound with the figure of each setting."""
    return [
        Checked(each.setting.name, bound.figure, bound.limit, bound.is_most, found.value if found else None)
        for each in judgements
        for bound in bounds
        for found in [each.figure(bound.figure)]
    ]
