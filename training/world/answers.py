# SPDX-License-Identifier: Apache-2.0
"""Which replies are right: the wanted one, or another wording of the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from training.world import spoken, talk

_FREE_SLOTS = frozenset({"place"})
"""Slots that a reply may fill as it likes."""


@cache
def _groups() -> tuple[tuple[re.Pattern[str], ...], ...]:
    """The wordings of replies that mean the same."""
    groups: list[Sequence[str]] = [replies for _asks, replies in talk.FIXED.values()]
    groups += [memory.reply for memory in talk.MEMORIES]
    groups.append(talk.REFUSALS)
    return tuple(tuple(map(_pattern, group)) for group in groups)


def _pattern(template: str) -> re.Pattern[str]:
    seen: set[str] = set()

    def slot(match: re.Match[str]) -> str:
        name, article = match[2], r"(?:[Aa]n? )" if match[1] else ""
        if name in seen:
            return f"{article}(?P={name})"
        seen.add(name)
        return f"{article}(?P<{name}>[A-Za-z ]+)"

    escaped = re.sub(r"([.?*+()\[\]|$])", r"\\\1", template)
    return re.compile(re.sub(r"\{\^?(a )?(\w+)\}", slot, escaped))


def is_right(wanted: str, got: str) -> bool:
    """Return True if `got` says the same as `wanted`."""
    if got == wanted:
        return True
    return any(_same(group, wanted, got) for group in _groups())


def _same(group: Sequence[re.Pattern[str]], wanted: str, got: str) -> bool:
    known = [match for pattern in group if (match := pattern.fullmatch(wanted))]
    found = [match for pattern in group if (match := pattern.fullmatch(got))]
    if not known or not found:
        return False
    a, b = known[0].groupdict(), found[0].groupdict()
    return all(a[name].lower() == b[name].lower() for name in a.keys() & b.keys() - _FREE_SLOTS)


def words_of(text: str) -> list[str]:
    """The words of a text in lower case."""
    return re.findall(r"[a-z']+", text.lower())


def word_errors(wanted: str, got: str) -> tuple[int, int]:
    """Words to change, add or remove, and the number of words wanted."""
    a, b = words_of(wanted), words_of(got)
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1], len(a)


_KNOWN_WORDS = frozenset(word.lower() for word in spoken.WORDS)


def story_faults(ask: str, got: str, *, ended: bool) -> list[str]:
    """Return the faults of a story: unended, short, a sentence twice, unknown words, another topic."""
    sentences = [found.strip() for found in re.findall(r"[^.!?]+[.!?]+", got)]
    faults = [] if ended else ["no end"]
    if len(sentences) < 4:
        faults.append("short")
    if len(set(sentences)) < len(sentences):
        faults.append("repeats")
    if unknown := [word for word in words_of(got) if word not in _KNOWN_WORDS]:
        faults.append(f"unknown words {unknown[:3]}")
    topic = re.search(r"(?:about|named) (?:an? )?(?:child named )?(\w+)", ask)
    if topic and topic[1] not in ("a", "an", "child") and topic[1].lower() not in words_of(got):
        faults.append("another topic")
    return faults
