# SPDX-License-Identifier: Apache-2.0
"""Lets go of what nobody waits for any more, in the middle of a file: decoding a long one takes seconds of a processor.

Knows no codec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

IsWanted = Callable[[], bool]
"""Whether anybody still waits for what is being decoded; asked for each frame, so it must take no time."""

ItemT = TypeVar("ItemT")


class Unwanted(Exception):
    """Nobody waits any more; no fault of the file, so whoever began it says what is given up."""


def always() -> bool:
    """Somebody waits, however long it takes."""
    return True


def while_wanted(items: Iterable[ItemT], is_wanted: IsWanted) -> Iterator[ItemT]:
    """The items, as long as somebody waits for what becomes of them.

    Raises:
        Unwanted: nobody does any more.
    """
    for item in items:
        if not is_wanted():
            raise Unwanted
        yield item
