# SPDX-License-Identifier: Apache-2.0
"""Stage `more`: other sentences for the talker, spoken while it trains. They have codes, and no sound is kept.

flite speaks sixty times faster than real time on each core, so on many cores the talker hardly hears a sentence twice.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from training import bank, codes, state
from training.bank import Bank, VoiceCodes
from training.log import Log
from training.mel import Mel
from training.schedule import Clock
from training.settings import Settings, cores
from training.sizes import VOICES
from training.speech import Spoken, kept_docs, plan, speak_in_all_voices
from training.tokens import encode

_SENTENCES, _SENTENCES_TOY = 250, 20
"""Sentences of one shard, which one worker makes."""


def train(settings: Settings, seconds: float) -> None:
    """Write shards `more_NUMBER.pt` until the time is over."""
    log, clock = Log(settings, "more"), Clock(seconds)
    workers = 1 if settings.toy else max(1, cores() // 2)
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=_work, args=(settings, clock, first, workers), daemon=True) for first in range(workers)
    ]
    for process in processes:
        process.start()
    log.say(f"{workers} workers")
    for process in processes:
        process.join()
    log.say(f"{len(list(settings.data.glob('more_*.pt')))} shards")


def _work(settings: Settings, clock: Clock, first: int, step: int) -> None:
    """Shards `first`, `first + step`, … as long as there is time for another."""
    os.nice(10)
    torch.set_num_threads(1)
    codebook, before = state.load(settings, "codebook"), state.load(settings, "talker")
    assert codebook is not None, "the stage `speech` makes it"
    # Other sentences than an earlier run's.
    seed = 1_000_003 * (settings.seed + 1) + (before.steps if before else 0) * 1009
    number = first
    while not clock.over:
        made = make_shard(codebook.tensors["centers"], _SENTENCES_TOY if settings.toy else _SENTENCES, seed + number)
        bank.save(settings, made, f"more_{number:06d}.pt")
        number += step


def make_shard(centers: Tensor, sentences: int, seed: int) -> Bank:
    """A bank of other sentences.

    Args:
        centers: the codebook, on the CPU.
        sentences: how many, less those that flite does not speak.
        seed: of the sentences.
    """
    docs, texts = plan(sentences, seed)
    found = [speak_in_all_voices(text) for text in texts]
    kept = [number for number, voices in enumerate(found) if voices]
    texts = [texts[number] for number in kept]
    mel = Mel()
    voices = {v.flite: voice_codes([found[number][v.flite] for number in kept], mel, centers) for v in VOICES}
    first, later = [encode(text) for text in texts], [encode(" " + text) for text in texts]
    return Bank(texts, first, later, kept_docs(docs, kept), voices)


def voice_codes(spoken: Sequence[Spoken], mel: Mel, centers: Tensor) -> VoiceCodes:
    """Codes of one voice's sentences."""
    waves = [torch.from_numpy(one.samples).float() / 32768 for one in spoken]
    numbers = [codes.quantise(mel(wave.unsqueeze(0))[0], centers)[0] for wave in waves]
    length = torch.tensor([len(one) for one in numbers])
    return VoiceCodes(
        torch.cat(numbers),
        length.cumsum(0) - length,
        length,
        torch.from_numpy(np.concatenate([one.first for one in spoken])),
        torch.from_numpy(np.concatenate([one.later for one in spoken])),
    )
