# SPDX-License-Identifier: Apache-2.0
"""Word errors of a run's samples, by pocketsphinx with a language model of the small world; beside them flite's own.

`python -m training.judge FOLDER`, the folder being a run's `--out`, its unpacked samples, or the folder into which
`triton-omni evaluate` wrote a server's replies.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tarfile
import tempfile
import wave
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from training import exam
from training.sizes import VOICES, Voice
from training.speech import is_test, speak
from training.world import chats, spoken
from triton_omni_client.audio import Waveform
from triton_omni_client.evaluate.recognising import POCKETSPHINX, Recogniser, recogniser
from triton_omni_client.evaluate.words import Agreement, agreement, words_of

_WORLD_SENTENCES = 20_000
_SHOWN = 3
EVALUATION = "evaluate.json"
"""What `triton-omni evaluate` writes into its folder."""


@dataclass
class Group:
    """Samples of one kind in one voice."""

    found: list[tuple[Agreement, str, str]] = field(default_factory=list)
    """How text and sound agree, the text, and what was heard."""
    seconds: float = 0.0

    def line(self) -> str:
        """Percent of wrong words, words, skipped and repeated ones, seconds."""
        words = sum(one.words for one, _text, _heard in self.found)
        errors = sum(one.errors for one, _text, _heard in self.found)
        skipped, repeated = (sum(getattr(one, name) for one, *_ in self.found) for name in ("skipped", "repeated"))
        return f"{100 * errors / max(words, 1):6.1f} % {words:6d} {skipped:7d} {repeated:8d} {self.seconds:8.1f}"

    def worst(self) -> list[str]:
        """The samples with the most errors."""
        ordered = sorted(self.found, key=lambda one: -one[0].errors)
        return [f"   said  {text}\n   heard {heard}" for one, text, heard in ordered[:_SHOWN] if one.errors]


def world_texts(count: int = _WORLD_SENTENCES) -> list[str]:
    """Sentences of the small world, none of which is judged."""
    rng = random.Random(77)
    found: list[str] = []
    while len(found) < count:
        drawn = [*chats.chat(rng).sentences, spoken.sentence(rng), spoken.loose_words(rng)]
        found += [text for text in drawn if not is_test(text)]
    return found


@contextmanager
def samples_in(folder: Path) -> Iterator[Path]:
    """The folder with WAV files and `tasks.json`, unpacked if it is in archives."""
    with tempfile.TemporaryDirectory() as scratch:
        for path in sorted(folder.glob("samples-*.tar")):
            with tarfile.open(path) as tar:
                tar.extractall(scratch, filter="data")
        unpacked = Path(scratch) / "samples"
        yield unpacked if unpacked.exists() else folder


def judge(ear: Recogniser, folder: Path) -> dict[str, Group]:
    """All samples of a folder by kind and voice."""
    texts: dict[str, str] = json.loads((folder / "tasks.json").read_text())["texts"]
    groups: dict[str, Group] = defaultdict(Group)
    for path in sorted(folder.glob("*.wav")):
        kind, voice, number = path.stem.split("_")
        text = texts[f"{'story' if kind == 'story' else 'say'}_{voice}_{number}"]
        add(groups[f"{kind} {voice}"], ear, text, read_wav(path))
    return dict(groups)


def judge_flite(ear: Recogniser) -> dict[str, Group]:
    """flite itself on the same texts: the best that can be reached."""
    groups: dict[str, Group] = defaultdict(Group)
    for task in exam.tasks():
        sound = spoken_by_flite(task.text, task.voice)
        add(groups[f"flite-{task.name.split('_')[0]} {task.voice.name}"], ear, task.text, sound)
    return dict(groups)


def judge_served(ear: Recogniser, folder: Path) -> dict[str, Group]:
    """A server's replies by setting, kind and voice, against their own texts; and flite on each of these texts."""
    groups: dict[str, Group] = defaultdict(Group)
    by_flite: set[tuple[str, str]] = set()
    voices = {voice.name: voice for voice in VOICES}
    for setting in json.loads((folder / EVALUATION).read_text())["settings"]:
        for reply in setting["replies"]:
            kind, text, voice = reply["name"].split("-")[0], reply["text"], voices[reply["voice"]]
            if reply["file"]:
                add(groups[f"{setting['name']} {kind} {voice.name}"], ear, text, read_wav(folder / reply["file"]))
            if (text, voice.name) not in by_flite:
                by_flite.add((text, voice.name))
                add(groups[f"flite-{kind} {voice.name}"], ear, text, spoken_by_flite(text, voice))
    return dict(groups)


def spoken_by_flite(text: str, voice: Voice) -> Waveform:
    """The text's sentences one after another."""
    samples = [speak(sentence, voice.flite).samples for sentence in chats.split_sentences(text)]
    return np.concatenate(samples).astype(np.float32) / 32768


def add(group: Group, ear: Recogniser, text: str, samples: Waveform) -> None:
    """Let the recogniser hear a text's samples at 24 kHz."""
    heard = ear.hear(samples)
    group.found.append((agreement(words_of(text), heard), text, " ".join(heard)))
    group.seconds += len(samples) / 24000


def read_wav(path: Path) -> Waveform:
    """Samples in [-1, 1] of a WAV file of 16 bits."""
    with wave.open(str(path)) as file:
        samples: Waveform = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
    return samples


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m training.judge", description=__doc__)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    with recogniser(POCKETSPHINX, world_texts(), [word.lower() for word in spoken.WORDS]) as ear:
        if (given.folder / EVALUATION).exists():
            groups = judge_served(ear, given.folder)
        else:
            with samples_in(given.folder) as folder:
                groups = judge_flite(ear) | judge(ear, folder)
    lines = [f"{'':20s} {'errors':>8s} {'words':>6s} {'skipped':>7s} {'repeated':>8s} {'seconds':>8s}"]
    lines += [f"{name:20s} {group.line()}" for name, group in groups.items()]
    lines += [f"{name}\n{text}" for name, group in groups.items() for text in group.worst()]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
