# SPDX-License-Identifier: Apache-2.0
"""Asks a server the questions of a task file, some at a time, and keeps what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from triton_omni_client.aio import AsyncOmniClient
from triton_omni_client.audio import Waveform, empty_waveform, pcm16_from_waveform, wav_header
from triton_omni_client.errors import ConnectionFailed, OmniClientError
from triton_omni_client.messages import AudioDelta, Media, Request
from triton_omni_client.reply import Reply

from .pictures import draw
from .tasks import PLACE, PictureTask, SoundTask, Tasks

QuestionKind = Literal["sentence", "prompt", "picture", "sound"]
STAGES = ("thinker", "talker", "token2wav")


@dataclass(frozen=True)
class Setting:
    """A named set of stage options for requests."""

    name: str
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By stage."""


@dataclass(frozen=True)
class Question:
    """One request, and the reply that is expected."""

    kind: QuestionKind
    number: int
    """Number of its task."""
    seed: int
    ask: str
    voice: str | None = None
    """Speaker; None = the reply is not spoken."""
    media: Sequence[Media] = ()
    said: str | None = None
    """Expected text, word for word; None = free."""
    expected: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Its name in the report and of its WAV file; the same for every setting."""
        return f"{self.kind}-{self.number:03}-seed-{self.seed}"

    @property
    def spoken(self) -> bool:
        """True if its reply is spoken."""
        return self.kind in ("sentence", "prompt")

    def request(self, setting: Setting) -> Request:
        """Return the request with the options of a setting."""
        modalities = ("text", "audio") if self.spoken else ("text",)
        options: dict[str, Any] = {stage: setting.options.get(stage, {}) for stage in STAGES}
        options |= {"seed": self.seed, "voice": self.voice, "request_id": self.name}
        return Request.ask(self.ask, self.media, modalities=modalities, **options)


@dataclass(frozen=True)
class Answer:
    """A reply to a question, or the error in its place."""

    question: Question
    text: str = ""
    audio: Waveform = field(default_factory=empty_waveform, repr=False)
    boundaries: Sequence[int] = ()
    """Number of samples before each chunk except the first."""
    whole: bool = False
    """True if it has all samples that the server counted and no stage stopped at its limit."""
    error: str | None = None

    def wav(self) -> bytes:
        """Return the speech as the bytes of a WAV file: PCM16, mono, 24 kHz."""
        return wav_header(len(self.audio)) + pcm16_from_waveform(self.audio)


def spoken_questions(tasks: Tasks, voices: Sequence[str], seeds: Iterable[int]) -> list[Question]:
    """Return sentences and free questions with each seed; the voices take turns."""
    found = []
    for turn, seed in enumerate(seeds):
        for number, text in enumerate(tasks.sentences):
            voice = voices[(number + turn) % len(voices)]
            found.append(Question("sentence", number, seed, tasks.say.replace(PLACE, text), voice, said=text))
        for number, text in enumerate(tasks.prompts):
            found.append(Question("prompt", number, seed, text, voices[(number + turn) % len(voices)]))
    return found


def questions_to_speak(tasks: Tasks, voices: Sequence[str], seed: int) -> list[Question]:
    """Return requests that have the texts of sounds spoken; the voices take turns."""
    return [
        Question("sentence", at, seed, tasks.say.replace(PLACE, task.text), voices[at % len(voices)], said=task.text)
        for at, task in enumerate(tasks.sounds)
        if task.text
    ]


def picture_questions(tasks: Sequence[PictureTask], seeds: Iterable[int]) -> list[Question]:
    """Return questions about pictures, drawn or read, with each seed.

    Raises:
        BadRequest: a file cannot be read.
    """
    media = [Media("image", draw(task)) if task.file is None else Media.from_file("image", task.file) for task in tasks]
    return [_about("picture", number, seed, task, media[number]) for seed in seeds for number, task in enumerate(tasks)]


def sound_questions(tasks: Sequence[SoundTask], spoken: Mapping[str, bytes], seeds: Iterable[int]) -> list[Question]:
    """Return spoken questions with each seed; `spoken` has the WAV file of each text.

    Raises:
        BadRequest: a file cannot be read.
    """
    media = [
        Media("audio", spoken[task.text]) if task.file is None else Media.from_file("audio", task.file)
        for task in tasks
    ]
    return [_about("sound", number, seed, task, media[number]) for seed in seeds for number, task in enumerate(tasks)]


def _about(kind: QuestionKind, number: int, seed: int, task: PictureTask | SoundTask, medium: Media) -> Question:
    return Question(kind, number, seed, task.ask, media=[medium], expected=task.expected)


async def ask_all(
    client: AsyncOmniClient, questions: Sequence[Question], setting: Setting, at_once: int, told: Callable[[], None]
) -> list[Answer]:
    """Return the answers in the order of the questions; call `told` after each.

    Raises:
        ConnectionFailed: the server cannot be reached.
    """
    places = asyncio.Semaphore(at_once)

    async def answered(question: Question) -> Answer:
        async with places:
            answer = await _ask(client, question, setting)
        told()
        return answer

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answered(question)) for question in questions]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return [task.result() for task in tasks]


async def _ask(client: AsyncOmniClient, question: Question, setting: Setting) -> Answer:
    lengths: list[int] = []
    try:
        async with client.stream(question.request(setting)) as stream:
            async for delta in stream:
                if isinstance(delta, AudioDelta):
                    lengths.append(len(delta.samples))
            reply = stream.reply()
    except ConnectionFailed:
        raise
    except OmniClientError as error:
        return Answer(question, error=f"{error.code}: {error.message}")
    return Answer(question, reply.text, reply.audio, list(accumulate(lengths))[:-1], _is_whole(reply, question.spoken))


def _is_whole(reply: Reply, spoken: bool) -> bool:
    if reply.info is None:
        return False
    stages = STAGES if spoken else STAGES[:1]
    ended = all(reply.info.finish_reason.get(stage) != "length" for stage in stages)
    return ended and (not spoken or (len(reply.audio) == reply.info.samples and bool(np.any(reply.audio))))
