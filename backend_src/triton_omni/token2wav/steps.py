# SPDX-License-Identifier: Apache-2.0
"""Work that is launched in steps, between which its owner may do other work."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Yields between steps, and returns their result."""


def run_out(steps: Steps[T]) -> T:
    """Run all remaining steps, and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
