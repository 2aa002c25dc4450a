# SPDX-License-Identifier: Apache-2.0
"""Tables of Markdown, as scripts print them and documents have them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table, each row as soon as it comes; a `|` in a cell is escaped."""
    yield _line(head)
    yield "|" + "---|" * len(head)
    yield from map(_line, rows)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
