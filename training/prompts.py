# SPDX-License-Identifier: Apache-2.0
"""Stage `prompts`: flite speaks prompts to the thinker on all cores, into files that its training reads as they appear.

One voice of flite is never used here: the judge asks with it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from training.flite import SPEECH_RATE, VOICES, Flite, Utterance
from training.log import Log
from training.settings import Settings, cores
from training.tokens import tokenizer
from training.world import voiced
from training.world.voiced import Prompt

HELD_OUT_VOICE = "awb"
PHONES = tuple(
    """
    pau aa ae ah ao aw ax ay b ch d dh eh er ey f g hh ih iy jh k l m n ng ow oy p r s sh t th uh uw v w y z zh
    """.split()  # noqa: SIM905
)
"""cmulex's names."""
MAX_SECONDS = 7.2
_CLIPS_A_FILE = 400
_MAX_HOURS = 18.0
"""More speech than this is not needed."""


@dataclass(frozen=True)
class Clip:
    """A prompt as it was spoken."""

    prompt: Prompt
    voice: str
    samples: NDArray[np.int16] = field(repr=False)
    """[S] at 16 kHz."""
    tokens: NDArray[np.int64] = field(repr=False)
    """[N]: ids of its tokens in the order of their times, those without a sound left out."""
    token_times: NDArray[np.float32] = field(repr=False)
    """[N, 2]: beginnings and ends in seconds."""
    phones: NDArray[np.int64] = field(repr=False)
    """[P]: numbers in `PHONES`."""
    phone_ends: NDArray[np.float32] = field(repr=False)
    """[P], in seconds."""


def folder(settings: Settings) -> Path:
    """Where the files of clips lie; each is a pickled list."""
    return settings.data / "prompts"


def train(settings: Settings, seconds: float) -> None:
    """Speak prompts for some seconds, or until there are enough."""
    log = Log(settings, "prompts")
    folder(settings).mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    workers = 1 if settings.toy else max(1, min(24, cores() // 2))
    run = time.time_ns() % 10**9
    jobs = [(settings, number, run, deadline, _MAX_HOURS / workers) for number in range(workers)]
    if workers == 1:
        clips = _speak_all(jobs[0])
    else:
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            clips = sum(pool.map(_speak_all, jobs, chunksize=1))
    log.say(f"{clips} prompts spoken by {workers} processes")


def _speak_all(job: tuple[Settings, int, int, float, float]) -> int:
    """One process: clips until the deadline, in files; returns their number."""
    settings, number, run, deadline, hours = job
    os.nice(5)
    rng = random.Random(hash((settings.seed, number, run)))
    voices = tuple(voice for voice in VOICES if voice != HELD_OUT_VOICE)
    flite, done, spoken, files = Flite(voices), 0, 0.0, 0
    most = 12 if settings.toy else _CLIPS_A_FILE
    while time.monotonic() < deadline and spoken < hours * 3600:
        clips: list[Clip] = []
        # The first files are small, so that training can begin.
        while len(clips) < min(most, 25 * 2**files) and time.monotonic() < deadline:
            clip = speak(flite, rng, voiced.prompt(rng), rng.choice(voices))
            if clip is not None:
                clips.append(clip)
        write(folder(settings) / f"{run}.{number}.{files}.pkl", clips)
        files, done = files + 1, done + len(clips)
        spoken += sum(len(clip.samples) for clip in clips) / SPEECH_RATE
        if settings.toy and files > 1:
            break
    return done


def write(path: Path, clips: list[Clip]) -> None:
    """Write a file of clips; it is there whole or not at all."""
    new = path.with_suffix(".new")
    new.write_bytes(pickle.dumps(clips, protocol=pickle.HIGHEST_PROTOCOL))
    new.replace(path)


def read(path: Path) -> list[Clip]:
    """The clips of a file of this stage."""
    clips: list[Clip] = pickle.loads(path.read_bytes())
    return clips


def speak(flite: Flite, rng: random.Random, prompt: Prompt, voice: str, *, plain: bool = False) -> Clip | None:
    """Speak a prompt, at a random speed and pitch unless `plain`; None if it is too long or has no alignment."""
    slowness = 1.0 if plain or rng.random() < 0.4 else rng.uniform(0.85, 1.25)
    pitch = 1.0 if plain or rng.random() < 0.4 else rng.uniform(0.8, 1.25)
    said = flite.say(prompt.text, voice, slowness=slowness, pitch=pitch)
    found = token_times(prompt.text, said)
    if found is None or len(said.samples) > MAX_SECONDS * SPEECH_RATE:
        return None
    phones = np.array([PHONES.index(phone.name) for phone in said.phones])
    ends = np.array([phone.end for phone in said.phones], np.float32)
    return Clip(prompt, voice, said.samples, *found, phones, ends)


def token_times(text: str, said: Utterance) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
    """Ids [N] and times [N, 2] of the tokens that are heard; None if flite's words are not the text's."""
    places = [match.span() for match in re.finditer(r"[A-Za-z']+", text)]
    if len(places) != len(said.words):
        return None
    encoded = tokenizer().encode(text)
    ids, times = [], []
    for number, (begin, end) in zip(encoded.ids, encoded.offsets, strict=True):
        for (first, last), word in zip(places, said.words, strict=True):
            a, b = max(begin, first), min(end, last)
            if a < b:
                pace = (word.end - word.start) / (last - first)
                ids.append(number)
                times.append((word.start + (a - first) * pace, word.start + (b - first) * pace))
                break
    return np.array(ids), np.array(times, np.float32).reshape(-1, 2)
