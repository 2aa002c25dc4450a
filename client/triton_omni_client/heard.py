# SPDX-License-Identifier: Apache-2.0
"""How much of a reply's text was heard when its speech was cut off.

The server sends text far ahead of speech and without an alignment, so this is an estimate. Speech runs evenly through
the text: at the reply's own pace once its length is known, before that at the pace of ordinary speech.
"""

from __future__ import annotations

import unicodedata

UNITS_A_SECOND = 15.0
"""Letters a second of ordinary speech (English: 150 words a minute of 6 letters, space included)."""
_WIDE_UNITS = 3
"""A character of Chinese, Japanese or Korean is a syllable: about five are spoken a second."""


def heard_text(text: str, heard: float, total: float | None = None) -> str:
    """The beginning of `text` that was spoken in `heard` seconds, up to the end of a word.

    Args:
        text: of the reply, as far as it has come.
        heard: seconds of its speech that reached the listener.
        total: seconds of its whole speech; None where not all of it has come.
    """
    if total is not None and heard >= total:
        return text
    reach = heard * UNITS_A_SECOND if total is None else heard / total * _units(text)
    return _whole_words(text, _reached(text, reach))


def _units(text: str) -> int:
    return sum(_WIDE_UNITS if _is_wide(character) else 1 for character in text)


def _is_wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in "WF"


def _reached(text: str, units: float) -> int:
    """How many characters fit into `units`."""
    for at, character in enumerate(text):
        units -= _WIDE_UNITS if _is_wide(character) else 1
        if units < 0:
            return at
    return len(text)


def _whole_words(text: str, end: int) -> str:
    """`text[:end]` without a word that is cut in two."""
    in_word = 0 < end < len(text) and not any(text[at].isspace() or _is_wide(text[at]) for at in (end - 1, end))
    if in_word:
        while end and not (text[end - 1].isspace() or _is_wide(text[end - 1])):
            end -= 1
    return text[:end].rstrip()
