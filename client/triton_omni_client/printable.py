# SPDX-License-Identifier: Apache-2.0
"""Text of a server as a terminal may show it: no character in it moves the cursor, hides text or turns it around."""

from __future__ import annotations

import re
from typing import Final

_UNSAFE: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls of ASCII and Latin-1, except tab and line feed
    "\u061c\u202a-\u202e\u2066-\u2069"  # overrides, embeddings and isolates of the direction
    "\u2028\u2029\ud800-\udfff]"  # separators of lines; halves of surrogate pairs, which no encoding holds
)


def printable(text: str) -> str:
    """`text` with such characters in JSON's notation, `\\u001b` for an escape; inside JSON they mean the same."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    """`printable` for a text that is part of a line."""
    return printable(" ".join(text.split("\n")))
