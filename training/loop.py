# SPDX-License-Identifier: Apache-2.0
"""The loop of a stage: steps until the time is over, averages of weights, curves, states."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from training import state
from training.log import Log
from training.schedule import Clock, Ema, Rate
from training.settings import Settings

Step = Callable[[int, float], dict[str, Tensor]]
"""(number of the step over all runs, learning rate) -> scalars that the curves show."""
_SAVED_EVERY = 10
"""Points of the curves."""
_DIVERGED = 1.5
"""So much above its lowest mean the watched value tells of divergence."""


class Guard:
    """Takes the weights back when training diverges.

    Args:
        ema: of the weights.
        watched: the curve that tells.
        log: is told of it.
    """

    def __init__(self, ema: Ema, watched: str, log: Log) -> None:
        self._ema, self._watched, self._log = ema, watched, log
        self._best, self._good = math.inf, ema.snapshot()
        self.factor = 1.0
        """Factor of the learning rate: halved each time."""

    def look(self, means: dict[str, float]) -> None:
        """Keep the weights if the means since the last look are the best, take them back if they are far worse."""
        value = means[self._watched]
        if math.isfinite(value) and value < self._best * _DIVERGED:
            # Those that are a little worse may have begun to diverge.
            if value <= self._best:
                self._best, self._good = value, self._ema.snapshot()
            return
        self._ema.restore(self._good)
        self.factor /= 2
        self._log.say(f"{self._watched} {value:.4g} after {self._best:.4g}: weights taken back, rate halved")


@dataclass(frozen=True)
class Loop:
    """Differences between the loops of the stages."""

    settings: Settings
    name: str
    """Name of the state, which keeps the averaged weights."""
    watched: str
    """The curve whose rise tells that training diverges."""
    log: Log
    ema: Ema
    rate: Rate
    shown_every: int
    """Steps of one point of the curves."""

    def run(self, step: Step, clock: Clock, done: int) -> None:
        """Run steps until the clock's time is over, `done` having been run before; keep the weights."""
        self.log.say(f"begins at step {done}")
        torch.manual_seed(self.settings.seed * 1_000_003 + done)  # a run that goes on draws other examples
        clock.restart()
        guard = Guard(self.ema, self.watched, self.log)
        first, sums = done, dict[str, Tensor]()
        while not clock.over:
            shown = step(done, self.rate.at(done - first, clock.part) * guard.factor)
            self.ema.update()
            sums = {name: value + sums.get(name, 0.0) for name, value in shown.items()}
            done += 1
            if (done - first) % self.shown_every == 0:
                means = {name: float(value) / self.shown_every for name, value in sums.items()}
                self.log.curve(done, **means)
                guard.look(means)
                sums = {}
            if (done - first) % (self.shown_every * _SAVED_EVERY) == 0:
                self._save(done)
        self._save(done)
        self.log.say(f"{done} steps in all")

    def _save(self, done: int) -> None:
        state.save(self.settings, self.name, self.ema.tensors, steps=done)
