# SPDX-License-Identifier: Apache-2.0
"""Measures each reply and sums the figures up. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from triton_omni_client.audio import SAMPLE_RATE, Waveform

from .asking import Answer, Setting
from .figures import Interval, Share, difference, figure
from .sound import (
    Array,
    boundary_clicks,
    clipped,
    mel_distance_db,
    silences,
    snr_db,
    voice_distance_db,
    voice_of,
)
from .words import agreement, is_right, words_of

Shares = dict[str, Share]


@dataclass(frozen=True)
class Judged:
    """A reply, its shares of figures by name, and the words that were heard."""

    answer: Answer
    shares: Shares
    heard: Sequence[str] | None = None
    """Words from the recogniser; None = it was not asked."""


@dataclass(frozen=True)
class Reference:
    """A reply that others are compared with."""

    asked: str
    voice: str | None
    audio: Waveform | None = None
    shares: Mapping[str, Share] = field(default_factory=dict)


References = Mapping[str, Reference]
"""By name of the question."""
Voices = Mapping[str, Array]
"""Mel statistics by speaker."""


@dataclass(frozen=True)
class Judgement:
    """All replies of one setting."""

    setting: Setting
    replies: Sequence[Judged]
    against: References = field(default_factory=dict)
    """Replies that they were compared with; empty = none."""

    def figure(self, name: str) -> Interval | None:
        """Return the figure of all replies with a share of it; None if there is none."""
        return figure(name, [reply.shares[name] for reply in self.replies if name in reply.shares])

    def difference(self, name: str) -> Interval | None:
        """Return a figure minus the reference's, over the requests that both answered; None if there is none."""
        pairs = [
            (reply.shares[name], reference.shares[name])
            for reply in self.replies
            if (reference := reference_of(reply.answer, self.against)) is not None
            and name in reply.shares
            and name in reference.shares
        ]
        return difference(name, [pair[0] for pair in pairs], [pair[1] for pair in pairs]) if pairs else None

    def references(self) -> dict[str, Reference]:
        """Return its replies as references for other settings."""
        return {
            reply.answer.question.name: Reference(
                reply.answer.question.ask, reply.answer.question.voice, reply.answer.audio, reply.shares
            )
            for reply in self.replies
        }

    def voices(self) -> dict[str, Array]:
        """Return the mean statistics of each speaker."""
        found: dict[str, list[Array]] = {}
        for reply in self.replies:
            _add_voice(found, reply.answer)
        return {voice: np.mean(each, axis=0) for voice, each in found.items()}


def reference_of(answer: Answer, references: References) -> Reference | None:
    """Return the reference's reply to the same question in the same voice; None if there is none."""
    found, question = references.get(answer.question.name), answer.question
    return found if found is not None and (found.asked, found.voice) == (question.ask, question.voice) else None


def judge(
    setting: Setting,
    answers: Sequence[Answer],
    heard: Sequence[Sequence[str] | None],
    references: References,
    voices: Voices | None,
) -> Judgement:
    """Measure the answers of one setting.

    Args:
        setting: options of the requests.
        answers: the replies.
        heard: recognised words of each reply; None = not recognised.
        references: replies to compare with; empty = none.
        voices: statistics of the speakers; None = take those of the other replies.
    """
    of_voices = _voice_shares(answers, voices)
    return Judgement(
        setting,
        [
            Judged(answer, _shares(answer, words, reference_of(answer, references)) | of_voices[at], words)
            for at, (answer, words) in enumerate(zip(answers, heard, strict=True))
        ],
        references,
    )


def _shares(answer: Answer, heard: Sequence[str] | None, reference: Reference | None) -> Shares:
    question = answer.question
    if question.kind in ("picture", "sound"):
        return {f"{question.kind}s": Share(float(answer.error is None and is_right(answer.text, question.expected)))}
    found = {"whole_replies": Share(float(answer.whole))}
    if answer.error is not None:
        return found
    if question.said is not None:
        asked = agreement(words_of(question.said), words_of(answer.text))
        found["text_errors"] = Share(asked.errors, asked.words)
    if heard is not None:
        found |= _heard_shares(answer, heard)
    if len(answer.audio):
        found |= _sound_shares(answer)
    if reference is not None and reference.audio is not None:
        found |= _reference_shares(answer, reference.audio)
    return found


def _heard_shares(answer: Answer, heard: Sequence[str]) -> Shares:
    spoken = agreement(words_of(answer.text), heard)
    return {
        "word_errors": Share(spoken.errors, spoken.words),
        "skipped_words": Share(spoken.skipped, spoken.words),
        "repeated_words": Share(spoken.repeated, spoken.words),
    }


def _sound_shares(answer: Answer) -> Shares:
    audio, seconds = answer.audio, len(answer.audio) / SAMPLE_RATE
    silent, ends = silences(audio), boundary_clicks(audio, answer.boundaries)
    spoken_s = seconds - silent.before - silent.after
    found = {
        "clipped": Share(clipped(audio), len(audio)),
        "silence": Share(silent.total, seconds),
        "longest_pause": Share(silent.longest),
        "words_per_s": Share(len(words_of(answer.text)), spoken_s),
    }
    if ends is not None:
        found |= {"boundary_excess": Share(ends.excess_db), "clicks": Share(ends.clicks, ends.count)}
    return found


def _reference_shares(answer: Answer, reference: Waveform) -> Shares:
    measured = {"mel_distance": mel_distance_db(reference, answer.audio), "snr": snr_db(reference, answer.audio)}
    found = {name: Share(value) for name, value in measured.items() if value is not None}
    if (ends := boundary_clicks(reference, answer.boundaries)) is not None:
        found["reference_clicks"] = Share(ends.clicks, ends.count)
    return found


def _add_voice(found: dict[str, list[Array]], answer: Answer) -> Array | None:
    """Add a reply's statistics to those of its speaker."""
    voice = answer.question.voice
    statistics = None if voice is None else voice_of(answer.audio)
    if voice is not None and statistics is not None:
        found.setdefault(voice, []).append(statistics)
    return statistics


def _voice_shares(answers: Sequence[Answer], known: Voices | None) -> list[Shares]:
    """Compare each reply with the speakers: the `known` ones, or the means of the other replies."""
    groups: dict[str, list[Array]] = {}
    statistics = [_add_voice(groups, answer) for answer in answers]
    return [
        {} if own is None else _voice_share(own, answer.question.voice, known or _means_without(groups, own))
        for answer, own in zip(answers, statistics, strict=True)
    ]


def _voice_share(own: Array, voice: str | None, voices: Voices) -> Shares:
    distances: dict[str | None, float] = {name: voice_distance_db(own, each) for name, each in voices.items()}
    if voice not in distances or len(distances) < 2:
        return {}
    is_nearest = distances[voice] == min(distances.values())
    return {"right_voices": Share(float(is_nearest)), "voice_distance": Share(distances[voice])}


def _means_without(groups: Mapping[str, Sequence[Array]], one: Array) -> Voices:
    """Return the mean statistics of each speaker without this reply's."""
    others = {name: [each for each in group if each is not one] for name, group in groups.items()}
    return {name: np.mean(each, axis=0) for name, each in others.items() if each}
