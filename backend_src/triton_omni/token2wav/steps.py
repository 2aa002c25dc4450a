# SPDX-License-Identifier: Apache-2.0
"""Work that is launched in steps, between which its owner may do something else."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Yields between steps, and returns what they came to."""


def run_out(steps: Steps[T]) -> T:
    """Take all steps that are left."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
