# SPDX-License-Identifier: Apache-2.0
"""Questions that `training/mini` answers in the same words with any seed, and in both voices so that they are heard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Known:
    """A question and the text of its right reply."""

    ask: str
    reply: str


VOICES: Final = ("Chelsie", "Ethan")
_SAID: Final = (
    "Once upon a time, a little fox lived in the forest.",
    "We will go to the market on Friday.",
    "There are seven apples in the basket.",
    "The old captain carried the lantern slowly.",
    "After ten days, they came to the silver lake.",
    "From that day on, they were best friends.",
    "They heard a strange sound near the garden.",
    "Early in the morning, a boy named Peter found a purple violin.",
)
QUESTIONS: Final[Sequence[Known]] = (
    *(Known(f"Say: {text}", text) for text in _SAID),
    Known("What color is the sky?", "The sky is blue."),
    Known("What is the capital of France?", "The capital of France is Paris."),
    Known("What day comes after Monday?", "Tuesday comes after Monday."),
    Known("How many legs does a spider have?", "A spider has eight legs."),
)
"""Few, so that each is asked often in both voices, and without the short ones that the recogniser hears badly."""
