# SPDX-License-Identifier: Apache-2.0
"""Objects that a `with` block closes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """Is closed at the end of a `with` block, however that ends."""

    @abstractmethod
    def close(self) -> None:
        """End what it does, and give back what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
