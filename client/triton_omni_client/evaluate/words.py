# SPDX-License-Identifier: Apache-2.0
"""Words of texts, and the differences between expected and recognised words. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

SKIP_WORDS: Final = 2
"""Missing words in a row that count as skipped: a recogniser may lose a single one."""
_WORD = re.compile(r"\d+|[^\W\d_]+(?:'[^\W\d_]+)*")
_STEMS = ["thir", "four", "fif", "six", "seven", "eigh", "nine"]
_ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_ONES += ["ten", "eleven", "twelve", *(f"{stem}teen" for stem in _STEMS)]
_TENS = ["twenty", *(f"{stem}ty".replace("fourty", "forty") for stem in _STEMS)]
_APOSTROPHE = "\N{RIGHT SINGLE QUOTATION MARK}"


def words_of(text: str) -> list[str]:
    """Return the words as they are spoken: lower case, no punctuation, numbers of up to three digits in letters."""
    found = _WORD.findall(text.lower().replace(_APOSTROPHE, "'"))
    return [word for each in found for word in (_spelled(int(each)) if each.isdecimal() and len(each) < 4 else [each])]


def _spelled(number: int) -> list[str]:
    if number < 20:
        return [_ONES[number]]
    if number < 100:
        return [_TENS[number // 10 - 2], *(_spelled(number % 10) if number % 10 else [])]
    return [_ONES[number // 100], "hundred", *(_spelled(number % 100) if number % 100 else [])]


@dataclass(frozen=True)
class Agreement:
    """Numbers of words."""

    words: int
    """Expected words."""
    errors: int
    """Substituted, missing and added words: the edit distance."""
    skipped: int
    """Missing words in runs of `SKIP_WORDS` or more."""
    repeated: int
    """Added words that repeat the words beside them."""


def agreement(said: Sequence[str], heard: Sequence[str]) -> Agreement:
    """Compare expected words with recognised ones."""
    if not said:
        return Agreement(0, len(heard), 0, 0)
    from jiwer import process_words

    found = process_words(" ".join(said), " ".join(heard))
    skipped = repeated = 0
    for chunk in found.alignments[0]:
        missing = chunk.ref_end_idx - chunk.ref_start_idx
        if chunk.type == "delete" and missing >= SKIP_WORDS:
            skipped += missing
        if chunk.type == "insert" and _repeats(heard, chunk.hyp_start_idx, chunk.hyp_end_idx):
            repeated += chunk.hyp_end_idx - chunk.hyp_start_idx
    return Agreement(len(said), found.substitutions + found.deletions + found.insertions, skipped, repeated)


def _repeats(heard: Sequence[str], start: int, end: int) -> bool:
    """Return True if words `start` to `end` stand beside their equals. An alignment may begin anywhere in a repeat."""
    length = end - start
    return any(
        heard[at : at + length] == heard[at + length : at + 2 * length]
        for at in range(max(0, start - length), start + 1)
        if at + 2 * length <= len(heard)
    )


def is_right(reply: str, expected: Sequence[str]) -> bool:
    """Return True if a reply has all words of one of the expected texts."""
    found = set(words_of(reply))
    return any(found.issuperset(words_of(each)) for each in expected)
