# SPDX-License-Identifier: Apache-2.0
"""Messages of a stage: lines on standard output, and its curves as JSON lines in `WORK/curves/STAGE.jsonl`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from training.settings import Settings


class Log:
    """Log of one stage; times count from the beginning of the run."""

    def __init__(self, settings: Settings, stage: str) -> None:
        self._stage, self._begin = stage, float(os.environ.get("TRAINING_BEGAN", time.time()))
        self._curves: Path = settings.work / "curves" / f"{stage}.jsonl"

    def say(self, text: str) -> None:
        """Print a line."""
        sys.stdout.write(f"[{self._stage} {time.time() - self._begin:6.1f} s] {text}\n")
        sys.stdout.flush()

    def curve(self, step: int, **values: float) -> None:
        """Add a point to the stage's curves, and print it."""
        row = {"step": step, "seconds": round(time.time() - self._begin, 1)}
        row |= {key: round(float(value), 5) for key, value in values.items()}
        self._curves.parent.mkdir(parents=True, exist_ok=True)
        with self._curves.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.say(f"step {step} " + " ".join(f"{key} {value:.4g}" for key, value in values.items()))
