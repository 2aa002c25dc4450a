# SPDX-License-Identifier: Apache-2.0
"""Samples of the networks' speech so far, as WAV files for the judge.

Kinds: `vocoder` (true mel frames), `copy` (true codes), `say` and `story` (the talker at HF's sampling), `cool` (the
talker at a low temperature). `tasks.json` has the texts and what was noticed.
"""

from __future__ import annotations

import argparse
import json
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from training import codes, exam, state
from training.dit import Speakers
from training.exam import Task
from training.log import Log
from training.mel import LOWEST, Mel
from training.parts import Part, part
from training.sampling import Sampling, speak
from training.schedule import Clock
from training.settings import Settings, add_arguments, from_arguments
from training.sizes import BLOCK, CODE_SAMPLES, RATE, VOICES
from training.speech import speak as speak_by_flite
from training.talker import frozen_text_model
from training.vocoder import synthesize

_COOL = Sampling(temperature=0.5, penalty=1.0)
_LONGEST_SENTENCE, _LONGEST_STORY, _LONGEST_TOY = 350, 1600, 20
"""Codes after which a reply counts as endless."""
_SOLVER_POINTS, _SOLVER_POINTS_TOY = 10, 2


@dataclass
class Studio:
    """The networks that there are, and where the sounds go."""

    settings: Settings
    log: Log
    facts: dict[str, Any]

    @property
    def folder(self) -> Path:
        """Folder of the WAV files."""
        return self.settings.work / "samples"

    def network(self, name: Part) -> Any:
        """A trained network on the device; FileNotFoundError if it was not trained."""
        module = part(name, self.settings.sizes)
        if state.load_into(self.settings, name, module) is None:
            raise FileNotFoundError(f"{state.folder(self.settings) / name}.pt")
        return module.to(self.settings.device).eval().requires_grad_(False)

    def write_facts(self) -> None:
        """Write what is known so far: the time may end at any moment."""
        (self.folder / "tasks.json").write_text(json.dumps(self.facts, indent=1))

    def write(self, kind: str, task: Task, samples: Tensor) -> None:
        """Write a task's samples in [-1, 1] as `KIND_VOICE_NUMBER.wav`."""
        name = task.name.split("_", 1)[1]
        write_wav(self.folder / f"{kind}_{name}.wav", (samples.clamp(-1, 1) * 32767).round().short().cpu().numpy())

    def mels(self, tasks: Sequence[Task], of_codes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Mel frames [80, T] of codes by HF's own solver, all at once."""
        dit, speakers, device = self.network("dit"), Speakers.of(self.settings), self.settings.device
        length = -(-max(map(len, of_codes)) // (BLOCK // 2)) * (BLOCK // 2)
        padded = torch.tensor([[*one, *[one[-1]] * (length - len(one))] for one in of_codes], device=device)
        voice = torch.tensor([VOICES.index(task.voice) for task in tasks], device=device)
        torch.manual_seed(0)
        points = _SOLVER_POINTS_TOY if self.settings.toy else _SOLVER_POINTS
        mel = dit.sample(speakers.cond[voice], speakers.reference[voice], padded, num_steps=points)
        return [frames[:, : 2 * len(one)] for frames, one in zip(mel, of_codes, strict=True)]

    def waves(self, mels: Sequence[Tensor]) -> list[Tensor]:
        """Samples of mel frames [80, T]."""
        vocoder, longest = self.network("vocoder"), max(mel.shape[1] for mel in mels)
        floor = float(np.log(LOWEST))
        batch = torch.stack([F.pad(mel.float(), (0, longest - mel.shape[1]), value=floor) for mel in mels])
        found = synthesize(vocoder, batch.to(self.settings.device))
        return [wave[: mel.shape[1] * CODE_SAMPLES // 2] for wave, mel in zip(found, mels, strict=True)]


@torch.no_grad()
def record_truth(studio: Studio, tasks: Sequence[Task]) -> None:
    """`vocoder` and `copy`: what is lost without a talker."""
    device = studio.settings.device
    mel_of, codebook = Mel().to(device), state.load(studio.settings, "codebook")
    assert codebook is not None, "the stage `speech` makes it"
    spoken = [speak_by_flite(task.text, task.voice.flite) for task in tasks]
    mels = [mel_of(torch.from_numpy(one.samples).to(device).float().unsqueeze(0) / 32768)[0] for one in spoken]
    for task, wave_ in zip(tasks, studio.waves([mel.T for mel in mels]), strict=True):
        studio.write("vocoder", task, wave_)
    centers = codebook.tensors["centers"].to(device)
    true_codes = [codes.quantise(mel, centers)[0].tolist() for mel in mels]
    copies = studio.mels(tasks, true_codes)
    distances = [float((copy.T - mel).abs().mean()) for copy, mel in zip(copies, mels, strict=True)]
    studio.facts["copy_mel_l1"] = round(float(np.mean(distances)), 4)
    studio.log.say(f"copies: mean L1 of log mels {studio.facts['copy_mel_l1']}")
    for task, wave_ in zip(tasks, studio.waves(copies), strict=True):
        studio.write("copy", task, wave_)


@torch.no_grad()
def record_talker(studio: Studio, tasks: Sequence[Task], kind: str, sampling: Sampling) -> None:
    """The talker's speech of given texts, as `kind`."""
    text, limit = frozen_text_model(studio.settings), _LONGEST_STORY if kind == "story" else _LONGEST_SENTENCE
    limit = _LONGEST_TOY if studio.settings.toy else limit
    found = speak(studio.network("talker"), text, tasks, sampling, limit)
    endless = [task.name for task, one in zip(tasks, found, strict=True) if one is None]
    studio.facts[f"{kind}_endless"] = endless
    studio.log.say(f"{kind}: {len(tasks) - len(endless)} of {len(tasks)} ended")
    ended = [(task, one) for task, one in zip(tasks, found, strict=True) if one]
    if not ended:
        return
    waves = studio.waves(studio.mels([task for task, _one in ended], [one for _task, one in ended]))
    for (task, _one), wave_ in zip(ended, waves, strict=True):
        studio.write(kind, task, wave_)


def record(settings: Settings, seconds: float) -> None:
    """Record all kinds, as far as networks and time allow."""
    studio, clock = Studio(settings, Log(settings, "samples"), {}), Clock(seconds)
    studio.folder.mkdir(parents=True, exist_ok=True)
    tasks = exam.tasks()
    if settings.toy:
        tasks = [task for task in tasks if task.name.endswith("_00")]
    say, story = ([task for task in tasks if task.name.startswith(kind)] for kind in ("say", "story"))
    studio.facts["texts"] = {task.name: task.text for task in tasks}
    steps: tuple[Callable[[], None], ...] = (
        lambda: record_truth(studio, say),
        lambda: record_talker(studio, say, "say", Sampling()),
        lambda: record_talker(studio, story, "story", Sampling()),
        lambda: record_talker(studio, say[::2], "cool", _COOL),
    )
    for step in steps:
        studio.write_facts()
        if not clock.over:
            try:
                step()
            except FileNotFoundError as error:
                studio.log.say(f"not there: {error}")
    studio.write_facts()


def write_wav(path: Path, samples: NDArray[np.int16]) -> None:
    """Write samples [S] at 24 kHz."""
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE, len(samples), "NONE", ""))
        file.writeframes(samples.astype("<i2").tobytes())


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m training.samples", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    add_arguments(parser)
    given = parser.parse_args()
    record(from_arguments(given), given.seconds)


if __name__ == "__main__":
    main()
