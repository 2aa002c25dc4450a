# SPDX-License-Identifier: Apache-2.0
"""Reads the pages of an Ogg file (RFC 3533): where its links begin, where a page ends, how many samples there are."""

from __future__ import annotations

import re
from collections.abc import Iterator

from triton_omni.core.errors import BadRequest

MOST_LINKS = 2000
"""Each is opened like a file of its own, in half a millisecond."""
_FIRST_PAGE = re.compile(rb"OggS\x00[\x02\x03\x06\x07]")
"""First page of a stream, by flag 2."""
_HEADER = 27
_POSITION = 6


def links(data: bytes) -> Iterator[bytes]:
    """The pieces of a chained file, each of which is one by itself: they may differ in codec and rate.

    A piece begins with the first pages of its streams, one after another.

    Raises:
        BadRequest: over `MOST_LINKS`.
    """
    start, follows, count = 0, 0, 1
    for found in _FIRST_PAGE.finditer(data):
        place = found.start()
        if place not in (start, follows):
            yield data[start:place]
            start, count = place, count + 1
            if count > MOST_LINKS:
                raise BadRequest(f"over {MOST_LINKS} streams are joined in it, which is the limit; encode it anew")
        follows = page_end(data, place)
    yield data[start:]


def page_end(data: bytes, place: int) -> int:
    """Where the page that begins at `place` ends."""
    segments = data[place + _HEADER - 1] if place + _HEADER <= len(data) else 0
    table = data[place + _HEADER : place + _HEADER + segments]
    return place + _HEADER + len(table) + sum(table)


def last_position(data: bytes) -> int:
    """Samples of a stream that is alone in its file, by its last page."""
    place = data.rfind(b"OggS") + _POSITION
    return int.from_bytes(data[place : place + 8], "little")
