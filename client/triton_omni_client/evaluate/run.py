# SPDX-License-Identifier: Apache-2.0
"""Runs an evaluation: asks the questions with each setting, recognises the speech, and judges the replies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from triton_omni_client.aio import AsyncOmniClient
from triton_omni_client.bench.server import server_facts
from triton_omni_client.errors import BadRequest, ConnectionFailed
from triton_omni_client.report_file import environment

from .asking import (
    Answer,
    Question,
    Setting,
    ask_all,
    picture_questions,
    questions_to_speak,
    sound_questions,
    spoken_questions,
)
from .bounds import Bound, check
from .judging import judge
from .recognising import recogniser
from .report import Earlier, Report
from .tasks import Tasks
from .words import words_of

NO_RECOGNISER = "none"
GREEDY = {"temperature": 0}
"""Thinker options for a text that becomes a spoken question."""
Progress = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""Shows a bar of this title and length; the given function is called after each step."""


@dataclass(frozen=True)
class Plan:
    """Plan of an evaluation."""

    url: str
    model: str
    tasks: Tasks
    settings: Sequence[Setting]
    """The first is the reference of the others, unless `earlier` is given."""
    seeds: Sequence[int]
    voices: Sequence[str] = ()
    """Empty = all voices of the server."""
    at_once: int = 4
    recogniser: str = NO_RECOGNISER
    earlier: Earlier | None = None
    wait_s: float = 0.0
    bounds: Sequence[Bound] = ()

    def described(self) -> dict[str, Any]:
        """Return the plan as the report has it."""
        counts = {name: len(getattr(self.tasks, name)) for name in ("sentences", "prompts", "pictures", "sounds")}
        return {"tasks": self.tasks.name, **counts, "seeds": list(self.seeds), "voices": list(self.voices)}


def evaluate(plan: Plan, progress: Progress) -> Report:
    """Ask the questions, recognise the speech and judge the replies.

    Raises:
        BadRequest: a file cannot be read, the server tells no voices, or there is no such recogniser.
        ConnectionFailed: the server is not ready.
        OmniClientError: the server does not tell what it serves.
    """
    report = Report(environment(), {})
    plan, answers = asyncio.run(_ask(plan, report, progress))
    heard = _heard(plan, answers, report, progress)
    references, voices = (plan.earlier.references, plan.earlier.voices) if plan.earlier else ({}, None)
    for setting, found, words in zip(plan.settings, answers, heard, strict=True):
        judgement = judge(setting, found, words, references, voices)
        report.judgements.append(judgement)
        references = references or judgement.references()
    _note(report)
    report.bounds = check(plan.bounds, report.judgements)
    return report


async def _ask(plan: Plan, report: Report, progress: Progress) -> tuple[Plan, list[list[Answer]]]:
    """Return the plan with its voices, and the answers of each setting."""
    async with AsyncOmniClient(plan.url, model=plan.model) as client:
        if not await client.wait_ready(plan.wait_s):
            raise ConnectionFailed(await client.obstacle() or f"the model {plan.model} is not ready")
        facts = await server_facts(plan.url, plan.model)
        report.environment = {**report.environment, "url": plan.url, "server": facts.described()}
        plan = replace(plan, voices=plan.voices or await _voices(client, plan.model))
        report.plan = plan.described()
        asking = _Asking(plan, client, report.notes, progress)
        return plan, [await asking.answers(setting) for setting in plan.settings]


async def _voices(client: AsyncOmniClient, model: str) -> Sequence[str]:
    for served in await client.models():
        if served.name == model and served.voices:
            return served.voices
    raise BadRequest(f"the server does not tell the voices of {model}; give them by --voices")


class _Asking:
    """Asks one server; pictures and sounds are asked again only with other thinker options."""

    def __init__(self, plan: Plan, client: AsyncOmniClient, notes: list[str], progress: Progress) -> None:
        self._plan, self._client, self._notes, self._progress = plan, client, notes, progress
        self._spoken: dict[str, bytes] | None = None
        self._understood: dict[str, list[Answer]] = {}

    async def answers(self, setting: Setting) -> list[Answer]:
        """Return all answers with this setting: speech, then pictures and sounds."""
        tasks, seeds = self._plan.tasks, self._plan.seeds
        spoken = await self._ask(setting, spoken_questions(tasks, self._plan.voices, seeds), "speech")
        thinker = json.dumps(setting.options.get("thinker", {}), sort_keys=True)
        if thinker not in self._understood:
            questions = picture_questions(tasks.pictures, seeds)
            questions += sound_questions(tasks.sounds, await self._sounds(setting), seeds)
            self._understood[thinker] = await self._ask(setting, questions, "pictures and sounds")
        return spoken + self._understood[thinker]

    async def _sounds(self, setting: Setting) -> dict[str, bytes]:
        """Return the WAV file of each text that is asked aloud; the server speaks it with the first setting."""
        if self._spoken is None:
            questions = questions_to_speak(self._plan.tasks, self._plan.voices, self._plan.seeds[0])
            greedy = Setting(setting.name, {**setting.options, "thinker": GREEDY})
            answers = await self._ask(greedy, questions, "questions to speak")
            self._spoken = {str(answer.question.said): answer.wav() for answer in answers}
            other = [answer.text for answer in answers if words_of(answer.text) != words_of(answer.question.said or "")]
            if other:
                said = (
                    f"{len(other)} of {len(answers)} questions were not spoken word for word, such as {other[0]!r:.80}"
                )
                self._notes.append(said)
        return self._spoken

    async def _ask(self, setting: Setting, questions: Sequence[Question], title: str) -> list[Answer]:
        with self._progress(f"{setting.name}: {title}", len(questions)) as told:
            return await ask_all(self._client, questions, setting, self._plan.at_once, told)


def _heard(
    plan: Plan, answers: Sequence[Sequence[Answer]], report: Report, progress: Progress
) -> list[list[list[str] | None]]:
    """Return the recognised words of each answer of each setting."""
    if plan.recogniser == NO_RECOGNISER:
        return [[None for _ in each] for each in answers]
    spoken = [answer for each in answers for answer in each if _is_heard(answer)]
    said = [word for answer in spoken for word in words_of(answer.text)]
    with (
        recogniser(plan.recogniser, plan.tasks.world_texts(), said) as listener,
        progress("recognition", len(spoken)) as told,
    ):
        report.plan = {**report.plan, "recogniser": listener.name}
        unknown = listener.unknown(said)
        if unknown:
            share = 100 * sum(word in unknown for word in said) / len(said)
            report.notes.append(
                f"{share:.1f} % of the replies' words are unknown to the recogniser and count as errors, "
                f"such as {', '.join(sorted(unknown)[:5])}"
            )
        words = listener.hear_all(answer.audio for answer in spoken)
        return [[_next(words, told) if _is_heard(answer) else None for answer in each] for each in answers]


def _is_heard(answer: Answer) -> bool:
    return answer.question.spoken and answer.error is None


def _next(words: Iterator[list[str]], told: Callable[[], None]) -> list[str]:
    told()
    return next(words)


def _note(report: Report) -> None:
    """Add a note about each setting that has no distance to its reference."""
    for judgement in report.judgements:
        if judgement.difference("whole_replies") and not judgement.figure("snr"):
            report.notes.append(
                f"{judgement.setting.name}: no reply is as long as the reference's: no mel distance and no SNR"
            )
