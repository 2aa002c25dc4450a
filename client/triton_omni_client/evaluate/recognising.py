# SPDX-License-Identifier: Apache-2.0
"""Speech recognisers: pocketsphinx, or any checkpoint of transformers' speech recognition by its name."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from triton_omni_client.audio import SAMPLE_RATE, Waveform
from triton_omni_client.errors import BadRequest

from .words import words_of

POCKETSPHINX: Final = "pocketsphinx"
_RATE: Final = 16_000
_PEAK: Final = 0.6
"""Level of the loudest sample for pocketsphinx: its models know speech of about this level."""
_PAUSE: Final = np.zeros(_RATE * 3 // 10, np.float32)
_NOISE: Final = 1e-4
"""Level of added noise: its models do not know digital silence."""
_OTHER_PRONUNCIATION = re.compile(r"\(\d+\)$")


class Recogniser(Protocol):
    """A speech recogniser."""

    name: str
    """Name with version, or checkpoint, for the report."""

    def hear(self, samples: Waveform) -> list[str]:
        """Return the words of a waveform."""

    def hear_all(self, clips: Iterable[Waveform]) -> Iterator[list[str]]:
        """Return the words of each waveform, in order."""

    def unknown(self, words: Sequence[str]) -> set[str]:
        """Return the words that it can never recognise."""


@contextmanager
def recogniser(name: str, world: Sequence[str], vocabulary: Sequence[str]) -> Iterator[Recogniser]:
    """Give the recogniser of this name.

    Args:
        name: `pocketsphinx`, or a checkpoint of transformers' speech recognition: a folder or a hub id.
        world: texts for pocketsphinx's language model.
        vocabulary: more words for it, in any order.

    Raises:
        BadRequest: the checkpoint cannot be loaded.
    """
    if name == POCKETSPHINX:
        with tempfile.TemporaryDirectory() as folder:
            yield _Pocketsphinx(world, vocabulary, Path(folder))
    else:
        yield _Whisper(name)


def _resampled(samples: Waveform) -> NDArray[np.float32]:
    import soxr  # type: ignore[import-untyped]

    found: NDArray[np.float32] = soxr.resample(samples, SAMPLE_RATE, _RATE)
    return found


class _Pocketsphinx:
    """pocketsphinx with its English acoustic model and dictionary, and a language model of the task file's world."""

    def __init__(self, world: Sequence[str], vocabulary: Sequence[str], folder: Path) -> None:
        from pocketsphinx import get_model_path  # type: ignore[import-untyped]

        self.name = f"{POCKETSPHINX} {version(POCKETSPHINX)}"
        models = Path(get_model_path("en-us"))
        pronounced = _pronunciations(models / "cmudict-en-us.dict")
        self._known = pronounced.keys()
        texts = [[word for word in words_of(text) if word in pronounced] for text in world]
        wanted = {word for text in [*texts, vocabulary] for word in text if word in pronounced}
        _write_language_model([text for text in texts if text], wanted, folder / "world.arpa")
        entries = [
            f"{word}{f'({number})' if number > 1 else ''} {sounds}"
            for word in sorted(wanted)
            for number, sounds in enumerate(pronounced[word], 1)
        ]
        (folder / "world.dict").write_text("\n".join(entries) + "\n", encoding="utf-8")
        self._model = _Model(str(models / "en-us"), str(folder / "world.arpa"), str(folder / "world.dict"))

    def hear(self, samples: Waveform) -> list[str]:
        return _decoded(self._model, samples)

    def hear_all(self, clips: Iterable[Waveform]) -> Iterator[list[str]]:
        # Processes, because a decoder holds the interpreter's lock; not forked, because gRPC has threads here.
        workers, context = len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, context) as pool:
            yield from pool.map(functools.partial(_decoded, self._model), clips)

    def unknown(self, words: Sequence[str]) -> set[str]:
        return set(words) - self._known


class _Model(NamedTuple):
    """Files of a decoder, as pocketsphinx names them."""

    hmm: str
    lm: str
    dict: str


@functools.lru_cache(maxsize=1)
def _decoder(model: _Model) -> Any:
    """Return the decoder of this process."""
    from pocketsphinx import Decoder

    # Wider beams than its defaults, which lose the ends of long replies.
    return Decoder(**model._asdict(), loglevel="FATAL", beam=1e-80, wbeam=1e-60)


def _decoded(model: _Model, samples: Waveform) -> list[str]:
    if not np.any(samples):
        return []
    decoder = _decoder(model)
    sound = np.concatenate([_PAUSE, samples_at_peak(_resampled(samples)), _PAUSE])
    sound = sound + np.random.default_rng(0).normal(0, _NOISE, len(sound))
    decoder.start_utt()
    decoder.process_raw((np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes(), full_utt=True)
    decoder.end_utt()
    found = decoder.hyp()
    return words_of(found.hypstr) if found else []


def samples_at_peak(samples: Waveform) -> Waveform:
    """Return a waveform [S] scaled to that level; it must not be silent."""
    loud: Waveform = samples * np.float32(_PEAK / np.abs(samples).max())
    return loud


def _pronunciations(dictionary: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in dictionary.read_text(encoding="utf-8").splitlines():
        word, _, sounds = line.partition(" ")
        found.setdefault(_OTHER_PRONUNCIATION.sub("", word), []).append(sounds)
    return found


def _write_language_model(texts: Sequence[Sequence[str]], words: set[str], path: Path) -> None:
    from pocketsphinx.lm import ArpaBoLM  # type: ignore[import-untyped]

    listed = path.with_suffix(".words")
    listed.write_text("\n".join(sorted(words)) + "\n", encoding="utf-8")
    # The last line is empty: the model must know begin and end of a text though there is none.
    lines = "".join(f"{' '.join(text)}\n" for text in [*texts, []])
    model = ArpaBoLM(text=lines, word_file=str(listed), add_start=True)
    model.compute()
    with path.open("w", encoding="utf-8") as file:
        model.write(file)


class _Whisper:
    """A checkpoint of transformers' speech recognition."""

    def __init__(self, checkpoint: str) -> None:
        self.name = checkpoint
        try:
            from transformers import pipeline

            self._pipeline: Any = pipeline("automatic-speech-recognition", model=checkpoint)
        except (ImportError, OSError, ValueError) as error:
            said = f"{str(error).splitlines()[0]:.200}; give {POCKETSPHINX}, a folder or a hub id"
            raise BadRequest(f"recogniser {checkpoint}: cannot be loaded: {said}") from error
        # A long reply is heard in pieces; Whisper cuts it by the timestamps that it writes.
        is_whisper = self._pipeline.type == "seq2seq_whisper"
        self._options: dict[str, Any] = {"return_timestamps": True} if is_whisper else {"chunk_length_s": 30}

    def hear(self, samples: Waveform) -> list[str]:
        if not np.any(samples):
            return []
        sound = {"raw": _resampled(samples), "sampling_rate": _RATE}
        return words_of(self._pipeline(sound, **self._options)["text"])

    def hear_all(self, clips: Iterable[Waveform]) -> Iterator[list[str]]:
        return map(self.hear, clips)

    def unknown(self, words: Sequence[str]) -> set[str]:
        return set()
