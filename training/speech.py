# SPDX-License-Identifier: Apache-2.0
"""Speech by flite on all cores, its mel frames, its codes, and which token each code speaks.

Stage `speech`: writes the bank and each voice's sound below `WORK/data`, and the codebook into the states.
"""

from __future__ import annotations

import multiprocessing
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training import bank, codes, state
from training.bank import UNKNOWN, Bank, Doc, VoiceCodes
from training.flite import SPEECH_RATE, Flite, Span
from training.log import Log
from training.mel import Mel, mel_of_stream
from training.settings import Settings, cores
from training.sizes import CODE_SAMPLES, RATE, VOICES
from training.tokens import encode, encode_prompt, tokenizer
from training.world import chats, spoken

CODE_SECONDS = CODE_SAMPLES / RATE
_LEAD_S, _TRAIL_S = 0.06, 0.18
"""Silence kept before the first and after the last word."""
_FADE = 160
_LONGEST = 110
"""Characters of a sentence; longer ones are left out, and so are replies with them."""
_SENTENCES, _SENTENCES_TOY = 8000, 120
_REPLIES_PART = 0.75
"""Part of the sentences that come from replies; the rest is loose words, so that all words are known in any place."""
_JOB = 32
_KMEANS_POINTS, _KMEANS_ROUNDS = 300_000, 40


@dataclass(frozen=True)
class Spoken:
    """A sentence in one voice."""

    samples: NDArray[np.int16]
    """[codes * 480] at 24 kHz."""
    first: NDArray[np.int16]
    """[codes]: as in `VoiceCodes`."""
    later: NDArray[np.int16]

    @property
    def codes(self) -> int:
        """Its length in codes."""
        return len(self.samples) // CODE_SAMPLES


def train(settings: Settings, seconds: float) -> None:
    """Make what is not there yet; the time box is not used, since the amount decides what the others learn."""
    log = Log(settings, "speech")
    # Distances to centres are small differences of large numbers.
    torch.set_float32_matmul_precision("highest")
    if (settings.data / "bank.pt").exists():
        log.say("there already")
        return
    settings.data.mkdir(parents=True, exist_ok=True)
    docs, sentences = plan(_SENTENCES_TOY if settings.toy else _SENTENCES, settings.seed)
    log.say(f"{len(sentences)} sentences, {len(docs)} replies")
    found = speak_all(sentences, 2 if settings.toy else cores())
    kept = [number for number, voices in enumerate(found) if voices]
    log.say(f"flite spoke {len(kept)} sentences")
    texts = [sentences[number] for number in kept]
    voices = _finish(settings, [found[number] for number in kept], log)
    later = [encode(" " + text) for text in texts]
    bank.save(settings, Bank(texts, [encode(text) for text in texts], later, kept_docs(docs, kept), voices))
    log.say("done")


def plan(count: int, seed: int) -> tuple[list[Doc], list[str]]:
    """Draw replies of the small world until their sentences are `count`; the same arguments give the same ones."""
    rng = random.Random(seed)
    numbers: dict[str, int] = {}
    docs = []
    while len(numbers) < count * _REPLIES_PART:
        chat = chats.chat(rng)
        sentences = chat.sentences
        if is_speakable(sentences) and " ".join(sentences) == chat.turns[-1][1]:
            docs.append(Doc(encode_prompt(chat), [numbers.setdefault(text, len(numbers)) for text in sentences]))
    while len(numbers) < count:
        text = spoken.loose_words(rng)
        if is_speakable([text]):
            prompt = encode_prompt(chats.Chat("say", ((rng.choice(spoken.ASKS).format(text), text),)))
            docs.append(Doc(prompt, [numbers.setdefault(text, len(numbers))]))
    return docs, list(numbers)


def kept_docs(docs: Sequence[Doc], kept: Sequence[int]) -> list[Doc]:
    """The replies all of whose sentences are among `kept`, by their places there."""
    place = {number: new for new, number in enumerate(kept)}
    whole = [doc for doc in docs if all(number in place for number in doc.sentences)]
    return [Doc(doc.prompt, [place[number] for number in doc.sentences]) for doc in whole]


def is_speakable(sentences: Sequence[str]) -> bool:
    """True if each sentence is short enough and none is kept for the judge."""
    return bool(sentences) and not any(len(text) > _LONGEST or is_test(text) for text in sentences)


def is_test(text: str) -> bool:
    """True for sentences that only the judge uses; shorter ones are too common to leave out."""
    return text.count(" ") >= 4 and spoken.held_out(text)


def speak_all(sentences: Sequence[str], workers: int) -> list[dict[str, Spoken]]:
    """All sentences in all voices, in order; an empty entry for one that a voice did not speak well."""
    jobs = [sentences[begin : begin + _JOB] for begin in range(0, len(sentences), _JOB)]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        return [voices for job in pool.imap(_speak_job, jobs) for voices in job]


def _speak_job(sentences: Sequence[str]) -> list[dict[str, Spoken]]:
    return [speak_in_all_voices(text) for text in sentences]


def speak_in_all_voices(text: str) -> dict[str, Spoken]:
    """By voice; empty if one of them heard no word."""
    try:
        return {voice.flite: speak(text, voice.flite) for voice in VOICES}
    except ValueError:
        return {}


@cache
def _flite() -> Flite:
    """One a process."""
    return Flite(tuple(voice.flite for voice in VOICES))


def speak(text: str, voice: str) -> Spoken:
    """A sentence with little silence around it, in whole codes.

    Raises:
        ValueError: flite heard no word in it.
    """
    uttered = _flite().say(text, voice)
    if not uttered.words:
        raise ValueError(f"flite: no words in {text!r}")
    begin = max(0, round((uttered.words[0].start - _LEAD_S) * SPEECH_RATE))
    end = round((uttered.words[-1].end + _TRAIL_S) * SPEECH_RATE)
    samples = to_24khz(_faded(uttered.samples[begin:end].astype(np.float64)))
    count = len(samples) // CODE_SAMPLES
    shifted = [Span(w.name, w.start - begin / SPEECH_RATE, w.end - begin / SPEECH_RATE) for w in uttered.words]
    first, later = tokenizer().encode(text).offsets, tokenizer().encode(" " + text).offsets
    return Spoken(
        samples,
        align([start for start, _end in first], text, shifted, count),
        align([max(start - 1, 0) for start, _end in later], text, shifted, count),
    )


def _faded(x: NDArray[np.float64]) -> NDArray[np.float64]:
    fade = min(_FADE, len(x) // 4)
    x[:fade] *= np.linspace(0, 1, fade)
    x[len(x) - fade :] *= np.linspace(1, 0, fade)
    return x


def to_24khz(x: NDArray[np.float64]) -> NDArray[np.int16]:
    """16 kHz to 24 kHz by the Fourier transform, padded to whole codes."""
    unit = CODE_SAMPLES * SPEECH_RATE // RATE
    x = np.pad(x, (0, -len(x) % unit))
    spectrum = np.fft.rfft(x)
    spectrum[-1] *= 0.5  # the highest frequency stands for both halves
    wide = np.pad(spectrum, (0, len(x) // 4))
    out: NDArray[np.int16] = np.clip(np.round(np.fft.irfft(wide, len(x) * 3 // 2) * 1.5), -32768, 32767).astype(
        np.int16
    )
    return out


def align(starts: Sequence[int], text: str, words: Sequence[Span], count: int) -> NDArray[np.int16]:
    """Place of the token that each code speaks.

    Args:
        starts: first character of each token.
        text: the sentence.
        words: as flite spoke them.
        count: number of codes.

    Returns:
        [count]; all `UNKNOWN` if flite's words are not as many as the text's.
    """
    spans = [(found.start(), found.end()) for found in re.finditer(r"[A-Za-z']+", text)]
    if len(spans) != len(words):
        return np.full(count, UNKNOWN, np.int16)
    times = [time for word in words for time in (word.start, max(word.end, word.start + 1e-3))]
    characters = [place for begin, end in spans for place in (begin, end - 1e-3)]
    now = (np.arange(count) + 0.5) * CODE_SECONDS
    position = np.interp(now, times, characters, left=0.0, right=len(text) - 0.5)
    found = np.searchsorted(np.asarray(starts), position, side="right") - 1
    return np.clip(found, 0, len(starts) - 1).astype(np.int16)


def _finish(settings: Settings, found: Sequence[dict[str, Spoken]], log: Log) -> dict[str, VoiceCodes]:
    """Mel frames, codebook and codes; the sounds are kept."""
    mel_of = Mel().to(settings.device)
    mels = {}
    for voice in VOICES:
        wave = torch.from_numpy(np.concatenate([spoken[voice.flite].samples for spoken in found]))
        mels[voice.flite] = mel_of_stream(mel_of, wave, settings.device)
        bank.save_sound(settings, voice.flite, wave, mels[voice.flite])
    log.say(f"{sum(map(len, mels.values())) / 100 / 3600:.2f} hours")
    centers = _codebook(settings, list(mels.values())).to(settings.device)
    return dict(_voice_codes(found, mels, centers, log))


def _voice_codes(
    found: Sequence[dict[str, Spoken]], mels: dict[str, Tensor], centers: Tensor, log: Log
) -> Iterator[tuple[str, VoiceCodes]]:
    for name, mel in mels.items():
        spoken = [voices[name] for voices in found]
        length = torch.tensor([one.codes for one in spoken])
        all_codes, error = codes.quantise(mel, centers)
        different = int(torch.bincount(all_codes.int()).count_nonzero())
        log.say(f"{name}: {len(all_codes)} codes, {different} of them differ, squared error {error:.3f}")
        yield (
            name,
            VoiceCodes(
                all_codes,
                length.cumsum(0) - length,
                length,
                torch.from_numpy(np.concatenate([one.first for one in spoken])),
                torch.from_numpy(np.concatenate([one.later for one in spoken])),
            ),
        )


def _codebook(settings: Settings, mels: Sequence[Tensor]) -> Tensor:
    """The centres of an earlier run, so that its codes stay; else new ones."""
    kept = state.load(settings, "codebook")
    if kept is not None:
        return kept.tensors["centers"]
    generator = torch.Generator().manual_seed(settings.seed)
    limit = _KMEANS_POINTS // (20 if settings.toy else 1)
    points = [features_of_some(mel.to(settings.device), limit, generator) for mel in mels]
    rounds = 8 if settings.toy else _KMEANS_ROUNDS
    centers = codes.cluster(torch.cat(points), settings.sizes.codes, rounds, generator)
    state.save(settings, "codebook", {"centers": centers})
    return centers


def features_of_some(mel: Tensor, limit: int, generator: torch.Generator, piece: int = 400_000) -> Tensor:
    """Features [about limit, 320] of codes drawn from all of [frames, 80], in pieces of so many frames."""
    points = []
    for part in torch.split(mel, piece):
        features = codes.features(part)
        share = -(-limit * len(part) // len(mel))
        drawn = torch.randperm(len(features), generator=generator)[:share]
        points.append(features[drawn.to(mel.device)])
    return torch.cat(points)
