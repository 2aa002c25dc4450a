# SPDX-License-Identifier: Apache-2.0
"""Judges whole replies to known questions after a run: their text, the words heard in their speech, and the voice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import numpy as np

from triton_omni_client.evaluate.asking import Answer, Question, Setting
from triton_omni_client.evaluate.judging import Judged, judge
from triton_omni_client.evaluate.recognising import POCKETSPHINX, recogniser
from triton_omni_client.evaluate.sound import silences
from triton_omni_client.evaluate.tasks import BUILT_IN, read_tasks
from triton_omni_client.evaluate.words import words_of

from .asking import Ended
from .known import Known

# Bounds by 72 right replies of an undisturbed server on a CPU: each question in both voices with three seeds.
TEXT_ERRORS: Final = 1 / 3
"""Share of a text's words that may be wrong: none was, and two known replies differ in half or more."""
SPEECH_ERRORS: Final = 0.6
"""Share of words that may be heard wrong in one reply: up to 0.25 were; of another reply's, 0.67 or more."""
MEAN_SPEECH_ERRORS: Final = 0.25
"""The same, over all replies: 0.05 in one voice, 0.02 in the other."""
LENGTH: Final = 0.15
"""Share by which speech may be shorter or longer than the median of its question and voice: it was by up to 0.04."""
PAUSE_S: Final = 0.3
"""Longest silence: it was 0.19 s. Pieces of speech last 0.24 s, 0.48 s and more."""
HEARD: Final = 600
"""Replies that the recogniser hears, evenly spread; a reply takes it 0.15 s on one core."""
_FEWEST = 3
"""Replies of a question in a voice without which they have no usual length."""
_SHOWN = 20
Asked = tuple[str, str | None]
"""A question and the voice of its reply."""


@dataclass(frozen=True)
class Meaning:
    """Whole replies to known questions, judged."""

    replies: Sequence[Judged]

    def errors(self, name: str) -> float:
        """Share of wrong words in all replies: `text_errors` or `word_errors`."""
        shares = np.array([reply.shares[name] for reply in self.replies if name in reply.shares]).reshape(-1, 2)
        wrong, words = shares.sum(0)
        return float(wrong / max(1, words))

    def usual_lengths(self) -> Mapping[Asked, float]:
        """Median number of samples of a question in a voice, where it was answered often enough."""
        found: dict[Asked, list[int]] = {}
        for reply in self.replies:
            found.setdefault(_asked(reply), []).append(len(reply.answer.audio))
        return {asked: median(lengths) for asked, lengths in found.items() if len(lengths) >= _FEWEST}

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values, without the single replies."""
        errors = {f"{name}_percent": round(100 * self.errors(name), 2) for name in ("text_errors", "word_errors")}
        return {"replies": len(self.replies), "heard": sum(reply.heard is not None for reply in self.replies), **errors}


def understood(ended: Sequence[Ended]) -> Meaning:
    """Hear and judge all whole replies to known questions; a hurried one has another length than it should."""
    asked = [(each, each.planned.known) for each in ended if each.reply is not None and each.planned.fate != "hurried"]
    answers = [_answer(each, known) for each, known in asked if known is not None]
    said = [word for answer in answers for word in words_of(answer.text)]
    step = max(1, -(-len(answers) // HEARD))
    heard: list[list[str] | None] = [None] * len(answers)
    with recogniser(POCKETSPHINX, read_tasks(BUILT_IN).world_texts(), said) as listener:
        heard[::step] = listener.hear_all(answer.audio for answer in answers[::step])
    return Meaning(judge(Setting("soak"), answers, heard, {}, None).replies)


def _answer(ended: Ended, known: Known) -> Answer:
    request = ended.planned.request
    question = Question("sentence", ended.planned.number, request.seed or 0, known.ask, request.voice, said=known.reply)
    text = "" if ended.reply is None else ended.reply[0]
    return Answer(question, text, ended.speech, whole=bool(np.any(ended.speech)))


def faults_of(meaning: Meaning) -> Iterator[str]:
    """Each reply that is not the right one, and a mean of wrong words that is too high."""
    if not meaning.replies:
        yield "no known question got a whole reply"
    usual = meaning.usual_lengths()
    wrong = [(reply, what) for reply in meaning.replies if (what := _wrong(reply, usual.get(_asked(reply))))]
    for reply, what in wrong[:_SHOWN]:
        question, text = reply.answer.question, reply.answer.text
        heard = "" if reply.heard is None else f", heard {' '.join(reply.heard)!r}"
        yield f"request {question.number} ({question.ask!r}, {question.voice}) {what}: {text!r}{heard}"
    if len(wrong) > _SHOWN:
        yield f"and {len(wrong) - _SHOWN} more replies are not right"
    if (mean := meaning.errors("word_errors")) > MEAN_SPEECH_ERRORS:
        yield f"{100 * mean:.0f} % of the words of all replies were heard wrong"


def _asked(reply: Judged) -> Asked:
    return reply.answer.question.ask, reply.answer.question.voice


def _wrong(reply: Judged, usual_length: float | None) -> str | None:
    """Return the fault of a reply; None = it has none."""
    audio = reply.answer.audio
    shares = {name: share.value / share.weight for name, share in reply.shares.items() if share.weight}
    if shares["text_errors"] > TEXT_ERRORS:
        return "has another text"
    if not shares["whole_replies"]:
        return "has no speech"
    if shares.get("word_errors", 0) > SPEECH_ERRORS:
        return "is spoken in other words"
    if usual_length is not None and abs(len(audio) / usual_length - 1) > LENGTH:
        return f"is {len(audio) / usual_length:.2f} times as long as usual"
    silent = silences(audio)
    if (pause_s := max(silent.before, silent.longest, silent.after)) > PAUSE_S:
        return f"is silent for {pause_s:.2f} s"
    return None if shares.get("right_voices", 1) else "is in another voice"
