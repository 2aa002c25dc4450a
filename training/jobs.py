# SPDX-License-Identifier: Apache-2.0
"""Stages as processes of their own, each on one GPU, with a log file each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from training.settings import Settings

Status = Literal["waits", "runs", "done", "failed"]
MOST_TRIES = 2
_TAIL = 2500
"""Characters of a failed stage's log that are shown."""


@dataclass
class Job:
    """A stage of one run."""

    settings: Settings
    name: str
    gpu: str | None
    """Its CUDA_VISIBLE_DEVICES; None leaves that as it is."""
    tries: int = 0
    deadline: float = 0.0
    """End of its own time box, by `time.monotonic`."""
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def log(self) -> Path:
        """Where its output goes."""
        return self.settings.work / "logs" / f"{self.name}.log"

    @property
    def status(self) -> Status:
        """Its outcome so far."""
        if self._process is None:
            return "waits"
        code = self._process.poll()
        return "runs" if code is None else "failed" if code else "done"

    def start(self, seconds: float) -> None:
        """Run the stage in a session of its own for some seconds; after a failure plainly."""
        self.tries += 1
        self.deadline = time.monotonic() + seconds
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-u", "-m", "training.stages", self.name, "--seconds", f"{seconds:.0f}"]
        settings = self.settings if self.tries == 1 else replace(self.settings, plain=True)
        chosen = {} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": self.gpu}
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [*command, *settings.arguments()],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false", **chosen},
                start_new_session=True,
            )

    def kill(self) -> None:
        """End the stage and all that it started, if it still runs."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def forget(self) -> None:
        """Let a stage that has ended be started again."""
        self._process = None

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-_TAIL:].rstrip() if self.log.exists() else ""

    def last_line(self) -> str:
        """The last line of its log."""
        return self.tail().rpartition("\n")[2]


def visible_gpus(most: int | None) -> list[str]:
    """The GPUs of this process as CUDA_VISIBLE_DEVICES names them, at most so many."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(number) for number in range(torch.cuda.device_count())]
    return names[:most]
