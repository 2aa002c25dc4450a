# SPDX-License-Identifier: Apache-2.0
"""A server that speaks one tone for each word, and a recogniser of these tones, for tests of evaluations.

The server says given sentences, names pictures and answers spoken questions. `fault` names a fault of its replies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from client_fakes import INFO, FakeTriton, Samples, chunk, failure, final, inputs_of, parameters_of, tell
from triton_omni_client.audio import SAMPLE_RATE, WavDecoder
from triton_omni_client.evaluate.pictures import draw
from triton_omni_client.evaluate.tasks import BUILT_IN, Tasks, read_tasks
from triton_omni_client.evaluate.words import words_of

WORD = SAMPLE_RATE * 16 // 100
CHUNK = SAMPLE_RATE * 12 // 100
LOWEST, STEP = 1000.0, 12.5
VOICES = {"Chelsie": [0.5, -0.5], "Ethan": [1 / 24] * 24}
"""By speaker, the filter of the noise in its voice: high or low."""
TASKS = read_tasks(BUILT_IN)
_TEXTS = [*TASKS.sentences, *(task.text for task in TASKS.sounds)]
_TEXTS += [text for task in [*TASKS.pictures, *TASKS.sounds] for text in task.expected]
VOCABULARY = sorted({word for text in _TEXTS for word in words_of(text)})


def tones(text: str, voice: str) -> Samples:
    """Speech of a text: 0.16 s of a tone for each word."""
    time = np.arange(WORD) / SAMPLE_RATE
    envelope = np.hanning(WORD)
    words = [np.sin(2 * np.pi * (LOWEST + STEP * VOCABULARY.index(word)) * time) * envelope for word in words_of(text)]
    speech = 0.5 * np.concatenate(words)
    noise = np.random.default_rng(len(speech)).normal(0, 0.03, len(speech))
    return (speech + np.convolve(noise, VOICES[voice], "same")).astype(np.float32)


def words_in(samples: Samples) -> list[str]:
    """The words of such speech."""
    found = []
    for at in range(0, len(samples) - WORD + 1, WORD):
        spectrum = np.abs(np.fft.rfft(samples[at : at + WORD]))
        frequency = spectrum.argmax() * SAMPLE_RATE / WORD
        index = round((frequency - LOWEST) / STEP)
        found.append(VOCABULARY[index] if 0 <= index < len(VOCABULARY) else "")
    return [word for word in found if word]


class Ear:
    """A recogniser of tones."""

    name = "tones"

    def hear_all(self, clips: Iterable[Samples]) -> Iterator[list[str]]:
        return map(self.hear, clips)

    def hear(self, samples: Samples) -> list[str]:
        return words_in(samples)

    def unknown(self, words: Sequence[str]) -> set[str]:
        return set(words) - set(VOCABULARY)


@contextmanager
def ear(_name: str, _world: Sequence[str], _vocabulary: Sequence[str]) -> Iterator[Ear]:
    yield Ear()


@dataclass(frozen=True)
class Spoken:
    """A reply before it is sent."""

    text: str
    voice: str
    chunks: Sequence[Samples] = ()
    info: Any = None


@dataclass
class SpeakingServer(FakeTriton):
    """Speaks; every third spoken reply has the `fault`."""

    fault: str = ""
    tasks: Tasks = TASKS
    swapped: bool = False
    """Every reply is in the other voice."""
    said_instead: str = ""
    """The text of every spoken reply."""
    count: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.script = self.answer
        tell(self.configs["qwen2_5_omni"], voices=list(VOICES))

    def answer(self, request: Any, _context: Any) -> Iterator[Any]:
        parameters = parameters_of(request)
        spoken = "audio" in parameters["modalities"]
        faulty = self.fault != "" and spoken and next(self.count) % 3 == 1
        reply = self.reply(request, parameters, spoken)
        if faulty and self.fault == "refused":
            yield failure("no room [omni:internal;stage=talker]")
            return
        if faulty:
            reply = FAULTS[self.fault](reply)
        yield chunk(text=reply.text)
        yield from (chunk(audio=samples) for samples in reply.chunks)
        yield chunk(info=reply.info)
        yield final()

    def reply(self, request: Any, parameters: dict[str, Any], spoken: bool) -> Spoken:
        """The right reply."""
        inputs = inputs_of(request)
        media = inputs.get("media")
        voice = parameters.get("voice", "Chelsie")
        text = inputs["text_input"][0].decode().removeprefix("Say: ") if media is None else self.about(media[0])
        if self.swapped:
            voice = _other_name(voice)
        speech = tones(text, voice) if spoken else np.zeros(0, np.float32)
        if parameters.get("token2wav", {}).get("solver") == "euler":
            speech = speech + np.random.default_rng(0).normal(0, 0.01, len(speech)).astype(np.float32)
        offline = parameters.get("token2wav", {}).get("mode") == "offline"
        cuts = [] if offline else list(range(CHUNK, len(speech), CHUNK))
        reasons = {"thinker": "stop", "talker": "stop" if spoken else None, "token2wav": "stop" if spoken else None}
        info = INFO | {"finish_reason": reasons, "usage": INFO["usage"] | {"samples": len(speech)}}  # type: ignore[operator]
        return Spoken(self.said_instead or text, voice, np.split(speech, cuts) if spoken else (), info)

    def about(self, medium: bytes) -> str:
        """Name what a picture shows, or answer a spoken question."""
        for picture in self.tasks.pictures:
            if draw(picture) == medium:
                return f"I see {picture.expected[0]}."
        heard = words_in(WavDecoder().feed(medium))
        for sound in self.tasks.sounds:
            if words_of(sound.text) == heard:
                return f"It is {sound.expected[0]}."
        return "I do not know."


def _other(reply: Spoken) -> Spoken:
    """Another request's reply."""
    text = "The snail is slow."
    words = words_of(TASKS.sentences[-1])
    speech = tones(" ".join(words), reply.voice)
    return replace(reply, text=text, chunks=[speech], info=_with_samples(reply, len(speech)))


def _with_samples(reply: Spoken, samples: int) -> Any:
    return reply.info | {"usage": reply.info["usage"] | {"samples": samples}}


def _speech(reply: Spoken) -> Samples:
    return np.concatenate(reply.chunks)


def _changed(reply: Spoken, speech: Samples) -> Spoken:
    """The same with other speech, of which nobody says that something is missing."""
    cuts = list(range(CHUNK, len(speech), CHUNK))
    return replace(reply, chunks=np.split(speech, cuts), info=_with_samples(reply, len(speech)))


def _other_name(voice: str) -> str:
    return next(name for name in VOICES if name != voice)


def _other_voice(reply: Spoken) -> Spoken:
    return _changed(reply, tones(reply.text, _other_name(reply.voice)))


def _skipping(reply: Spoken) -> Spoken:
    speech = _speech(reply)
    return _changed(reply, np.concatenate([speech[:WORD], speech[3 * WORD :]]))


def _repeating(reply: Spoken) -> Spoken:
    speech = _speech(reply)
    return _changed(reply, np.concatenate([speech[: 3 * WORD], speech[WORD:]]))


def _losing_a_chunk(reply: Spoken) -> Spoken:
    return replace(reply, chunks=[*reply.chunks[:1], *reply.chunks[2:]])


def _clicking(reply: Spoken) -> Spoken:
    chunks = [samples.copy() for samples in reply.chunks]
    for samples in chunks[1:]:
        samples[0] += 0.3
    return replace(reply, chunks=chunks)


def _clipping(reply: Spoken) -> Spoken:
    return replace(reply, chunks=[np.clip(4 * samples, -1, 1) for samples in reply.chunks])


def _cut_off(reply: Spoken) -> Spoken:
    return replace(reply, info=reply.info | {"finish_reason": {"thinker": "stop", "talker": "length"}})


FAULTS = {
    "another's reply": _other,
    "another voice": _other_voice,
    "skipped words": _skipping,
    "repeated words": _repeating,
    "lost chunk": _losing_a_chunk,
    "clicks": _clicking,
    "clipping": _clipping,
    "cut off": _cut_off,
}
"""Faults of a spoken reply, beside `refused`."""
