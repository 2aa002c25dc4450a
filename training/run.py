# SPDX-License-Identifier: Apache-2.0
"""One run of the training: all stages side by side within a budget of time, from what an earlier run left.

The stages start when what they need is there. With several GPUs each network has its own; with one they share it.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from training import packing
from training.export import WEIGHTS, take
from training.jobs import MOST_TRIES, Job, visible_gpus
from training.settings import Settings, add_arguments, from_arguments
from training.stages import STAGES

_RESERVE_S, _RESERVE_TOY_S, _PACKING_S = 80.0, 60.0, 12.0
"""Kept for samples and archives, and for archives alone."""
_LEAST_S = 15.0
"""A stage is not started for less."""
_GRACE_S = 30.0
"""A stage may take longer than its time box by this: set-up, a step, saving."""
_SHOWN_EVERY_S, _SHOWN_CHARACTERS = 20.0, 160
_POLL_S = 0.5


@dataclass
class Run:
    """A run's stages and times, by `time.monotonic`."""

    settings: Settings
    jobs: list[Job]
    begin: float
    budget: float
    _shown: float = 0.0

    @property
    def left(self) -> float:
        """Seconds for stages."""
        reserve = _RESERVE_TOY_S if self.settings.toy else _RESERVE_S
        return self.begin + self.budget - reserve - time.monotonic()

    def say(self, text: str) -> None:
        """Print a line."""
        print(f"[run {time.monotonic() - self.begin:6.1f} s] {text}", flush=True)

    def train(self) -> None:
        """Run the stages until all have ended or the time is over."""
        try:
            while not self._turn():
                time.sleep(_POLL_S)
        finally:
            for job in self.jobs:
                job.kill()
        for job in self.jobs:
            self.say(f"{job.name} {job.status}: {job.last_line()}")

    def _turn(self) -> bool:
        """Look after each stage once; True if nothing is left to do."""
        for job in self.jobs:
            self._look_after(job)
        self._show()
        if any(job.status in {"runs", "failed"} for job in self.jobs):
            return False
        return self.left < _LEAST_S or not any(self._may_start(job) for job in self.jobs)

    def _look_after(self, job: Job) -> None:
        if job.status == "runs" and time.monotonic() > job.deadline + _GRACE_S:
            self.say(f"{job.name} does not end: killed")
            job.kill()
        if job.status == "failed":
            self.say(f"{job.name} failed, try {job.tries}:\n{job.tail()}")
            job.forget()
        if self._may_start(job):
            self.say(f"{job.name} starts for {self.left:.0f} s" + (f" on GPU {job.gpu}" if job.gpu else ""))
            job.start(self.left)

    def _may_start(self, job: Job) -> bool:
        needs = (self.settings.work / path for path in STAGES[job.name].needs)
        fresh = job.status == "waits" and job.tries < MOST_TRIES
        return fresh and self.left >= _LEAST_S and all(path.exists() for path in needs)

    def _show(self) -> None:
        if time.monotonic() - self._shown > _SHOWN_EVERY_S:
            self._shown = time.monotonic()
            for job in self.jobs:
                if job.status == "runs":
                    self.say(job.last_line()[:_SHOWN_CHARACTERS])


def alone(work: Path) -> TextIO:
    """Take the scratch folder for this process; it is free again when the file is closed.

    Raises:
        SystemExit: another run has it.
    """
    work.mkdir(parents=True, exist_ok=True)
    lock = (work / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise SystemExit(f"--work {work}: another run works there; wait for its end, or give another folder") from None
    return lock


def jobs_of(settings: Settings, names: list[str], gpus: list[str]) -> list[Job]:
    """A job a stage; those that need a GPU take turns at the GPUs."""
    jobs, turn = [], 0
    for name, stage in STAGES.items():
        if name in names:
            gpu = None if not gpus else gpus[turn % len(gpus)] if stage.gpu else ""
            turn += stage.gpu
            jobs.append(Job(settings, name, gpu))
    return jobs


def sample(settings: Settings, seconds: float) -> int:
    """Let the networks speak in a process of its own; its exit code."""
    command = [sys.executable, "-m", "training.samples", "--seconds", f"{seconds:.0f}", *settings.arguments()]
    try:
        return subprocess.run(command, check=False, timeout=max(seconds, 1.0) + _PACKING_S / 2).returncode
    except subprocess.TimeoutExpired:
        return 1


def main(arguments: list[str] | None = None) -> None:
    """Command line of `python -m training`."""
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for archives of states and samples, and the log"
    )
    parser.add_argument("--budget", type=float, default=540.0, help="seconds of the whole run (%(default)s)")
    parser.add_argument("--resume", type=Path, help="what an earlier run wrote as --out, or an exported checkpoint")
    parser.add_argument("--gpus", type=int, help="use at most so many (default: all that are visible)")
    parser.add_argument("--only", default=",".join(STAGES), help="stages to run (%(default)s)")
    add_arguments(parser)
    given = parser.parse_args(arguments)
    names = given.only.split(",")
    if unknown := sorted(set(names) - set(STAGES)):
        parser.error(f"--only: {', '.join(unknown)}: no such stage; there are {', '.join(STAGES)}")
    settings = from_arguments(given)
    lock = alone(settings.work)
    run = Run(settings, jobs_of(settings, names, visible_gpus(given.gpus)), time.monotonic(), given.budget)
    os.environ["TRAINING_BEGAN"] = str(time.time())
    if given.resume:
        unpack = take if (given.resume / WEIGHTS).exists() else packing.unpack
        run.say(f"goes on from {given.resume}: {', '.join(unpack(settings, given.resume))}")
    run.train()
    code = sample(settings, run.begin + run.budget - time.monotonic() - _PACKING_S)
    run.say("samples are there" if code == 0 else f"samples failed (exit code {code})")
    for path in packing.pack(settings, given.out):
        run.say(f"{path.name}: {path.stat().st_size / 2**20:.2f} MiB")
    lock.close()
