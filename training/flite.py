# SPDX-License-Identifier: Apache-2.0
"""flite 2.2 through ctypes: a text to samples, and when its words and phones are spoken. No process per sentence.

Debian's packages libflite1 and libasound2 have the libraries. Where they are not installed, `OMNI_FLITE` names a folder
with their files.
"""

from __future__ import annotations

import ctypes as c
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SPEECH_RATE = 16000
"""Samples a second of the voices that are used."""
VOICES = ("slt", "rms", "awb", "kal16")
_LIBRARIES = ("libasound.so.2", "libflite.so.1", "libflite_cmulex.so.1", "libflite_usenglish.so.1")
_POINTER_FUNCTIONS = (
    *("flite_synth_text", "utt_wave", "utt_relation", "relation_head"),
    *("item_next", "item_prev", "item_daughter", "item_last_daughter", "item_as"),
)


@dataclass(frozen=True)
class Span:
    """A word or a phone and its time in seconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Utterance:
    """One text as a voice speaks it."""

    samples: NDArray[np.int16] = field(repr=False)
    """[S] at 16 kHz."""
    words: tuple[Span, ...]
    phones: tuple[Span, ...]
    """In cmulex's names; 'pau' is silence. They follow each other without a gap."""


class _Wave(c.Structure):
    _fields_ = (
        ("type", c.c_char_p),
        ("sample_rate", c.c_int),
        ("num_samples", c.c_int),
        ("num_channels", c.c_int),
        ("samples", c.POINTER(c.c_short)),
    )


class _Voice(c.Structure):
    _fields_ = (("name", c.c_char_p), ("features", c.c_void_p))


class Flite:
    """The synthesiser of one process; not to be shared by threads.

    Raises:
        OSError: a library is missing; the message names it.
    """

    def __init__(self, voices: tuple[str, ...] = VOICES) -> None:
        libraries = {name: _load(name) for name in _LIBRARIES}
        self._lib = _declared(libraries["libflite.so.1"])
        self._lib.flite_init()
        self._voices = {voice: self._register(voice) for voice in voices}

    def say(self, text: str, voice: str, *, slowness: float = 1.0, pitch: float = 1.0) -> Utterance:
        """Speak a text.

        Args:
            text: what flite's own rules read.
            voice: one of those that were loaded.
            slowness: factor of all durations.
            pitch: factor of the fundamental frequency; `kal16` has no such setting.

        Raises:
            ValueError: flite made no sound of the text.
        """
        pointer = self._voices[voice]
        features = c.cast(pointer, c.POINTER(_Voice)).contents.features
        self._lib.feat_set_float(features, b"duration_stretch", slowness)
        self._lib.feat_set_float(features, b"f0_shift", pitch)
        utterance = self._lib.flite_synth_text(text.encode(), pointer)
        try:
            wave = c.cast(self._lib.utt_wave(utterance), c.POINTER(_Wave)).contents
            if wave.sample_rate != SPEECH_RATE or wave.num_samples < 1:
                raise ValueError(f"flite: {wave.num_samples} samples at {wave.sample_rate} Hz of {text!r}")
            samples = np.ctypeslib.as_array(wave.samples, shape=(wave.num_samples,)).copy()
            return Utterance(samples, tuple(self._words(utterance)), tuple(self._phones(utterance)))
        finally:
            self._lib.delete_utterance(utterance)

    def _register(self, voice: str) -> int:
        register = getattr(_load(f"libflite_cmu_us_{voice}.so.1"), f"register_cmu_us_{voice}")
        register.restype, register.argtypes = c.c_void_p, [c.c_char_p]
        return int(register(None))

    def _items(self, utterance: int, relation: bytes) -> Iterator[int]:
        item = self._lib.relation_head(self._lib.utt_relation(utterance, relation))
        while item:
            yield item
            item = self._lib.item_next(item)

    def _words(self, utterance: int) -> Iterator[Span]:
        """Words that are heard, in flite's own spelling: lower case, numbers in words."""
        for word in self._items(utterance, b"Word"):
            tree = self._lib.item_as(word, b"SylStructure")
            head, tail = (self._lib.item_daughter(tree), self._lib.item_last_daughter(tree)) if tree else (None, None)
            first = self._lib.item_daughter(head) if head else None
            last = self._lib.item_last_daughter(tail) if tail else None
            if first and last:
                yield Span(self._name(word), self._begin(self._lib.item_as(first, b"Segment")), self._end(last))

    def _phones(self, utterance: int) -> Iterator[Span]:
        begin = 0.0
        for item in self._items(utterance, b"Segment"):
            end = self._end(item)
            yield Span(self._name(item), begin, end)
            begin = end

    def _name(self, item: int) -> str:
        return str(self._lib.item_feat_string(item, b"name").decode("latin1"))

    def _end(self, item: int) -> float:
        return float(self._lib.item_feat_float(self._lib.item_as(item, b"Segment"), b"end"))

    def _begin(self, segment: int) -> float:
        before = self._lib.item_prev(segment)
        return self._end(before) if before else 0.0


def _load(name: str) -> c.CDLL:
    folder = os.environ.get("OMNI_FLITE")
    try:
        return c.CDLL(str(Path(folder) / name) if folder else name, mode=c.RTLD_GLOBAL)
    except OSError as error:
        raise OSError(
            f"{name} cannot be loaded ({error}); install Debian's libflite1 and libasound2, or set OMNI_FLITE to a "
            "folder with their libraries"
        ) from error


def _declared(lib: c.CDLL) -> c.CDLL:
    """The library with the types of the functions that are used."""
    for name in _POINTER_FUNCTIONS:
        getattr(lib, name).restype = c.c_void_p
    for name in ("utt_wave", "relation_head", "item_next", "item_prev", "item_daughter", "item_last_daughter"):
        getattr(lib, name).argtypes = [c.c_void_p]
    for name in ("utt_relation", "item_as", "item_feat_string", "item_feat_float"):
        getattr(lib, name).argtypes = [c.c_void_p, c.c_char_p]
    lib.flite_synth_text.argtypes = [c.c_char_p, c.c_void_p]
    lib.delete_utterance.argtypes = [c.c_void_p]
    lib.feat_set_float.argtypes = [c.c_void_p, c.c_char_p, c.c_float]
    lib.item_feat_string.restype, lib.item_feat_float.restype = c.c_char_p, c.c_float
    return lib
