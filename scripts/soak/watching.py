# SPDX-License-Identifier: Apache-2.0
"""The memory of a server's processes over time, and whether it grows: one line fitted to each process's samples."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from triton_omni.supervisor.leftovers import members

MIB = 1 << 20
_FEWEST = 10
"""Samples without which no line is fitted."""


@dataclass
class Watched:
    """Samples of one process; a stage that is started again is another one."""

    name: str
    pid: int
    seconds: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    """Bytes, shared memory included."""
    files: list[int] = field(default_factory=list)
    """Open file descriptors."""

    def since(self, seconds: float) -> Watched:
        """The samples from then on."""
        first = next((at for at, then in enumerate(self.seconds) if then >= seconds), len(self.seconds))
        return Watched(self.name, self.pid, self.seconds[first:], self.resident[first:], self.files[first:])


@dataclass(frozen=True)
class Growth:
    """A straight line through a process's samples."""

    name: str
    pid: int
    span_s: float
    mean: float
    """Bytes."""
    grown: float
    """Bytes, by the line, from the first sample to the last."""
    noise: float
    """Standard deviation of the samples about the line, in bytes."""
    files: int
    """How many more files were open at the end."""

    @classmethod
    def of(cls, watched: Watched) -> Growth | None:
        """None where there are too few samples for a line."""
        if len(watched.seconds) < _FEWEST:
            return None
        seconds, resident = np.array(watched.seconds), np.array(watched.resident, dtype=float)
        slope, start = np.polyfit(seconds - seconds[0], resident, 1)
        span = float(seconds[-1] - seconds[0])
        noise = float(np.std(resident - (start + slope * (seconds - seconds[0]))))
        files = watched.files[-1] - watched.files[0]
        return cls(watched.name, watched.pid, span, float(resident.mean()), float(slope * span), noise, files)

    def exceeds(self, bytes_allowed: float) -> bool:
        """True if it grew by more than is allowed and by more than its samples scatter."""
        return self.grown > bytes_allowed + 2 * self.noise

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        sizes = {name: round(getattr(self, name) / MIB, 2) for name in ("mean", "grown", "noise")}
        return {"process": self.name, "pid": self.pid, "span_s": round(self.span_s, 1), "files": self.files} | {
            f"{name}_mib": size for name, size in sizes.items()
        }


class MemoryWatch:
    """Samples on a thread of its own, from `start` to `close`.

    Args:
        leader: process id of tritonserver, whose group its stages are in.
        clock: seconds since the run began.
        every_s: seconds between two samples.
    """

    def __init__(self, leader: int, clock: Callable[[], float], every_s: float = 1.0) -> None:
        self._leader = leader
        self._clock = clock
        self._every_s = every_s
        self._processes: dict[tuple[str, int], Watched] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-memory", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def close(self) -> None:
        """Take no sample any more."""
        self._closing.set()
        self._thread.join()

    @property
    def processes(self) -> Sequence[Watched]:
        """All that were seen, in the order of their start."""
        return list(self._processes.values())

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            for pid in sorted(members(self._leader)):
                with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile
                    self._sample(psutil.Process(pid))

    def _sample(self, process: psutil.Process) -> None:
        resident, files = process.memory_info().rss, process.num_fds()
        if (name := _name(process.cmdline())) is None:
            return
        # Until a stage's process loads its own program, it is a copy of tritonserver.
        watched = self._processes.setdefault((name, process.pid), Watched(name, process.pid))
        watched.seconds.append(self._clock())
        watched.resident.append(resident)
        watched.files.append(files)


def _name(command: Sequence[str]) -> str | None:
    """The stage that a process serves, by its command line; None = it is no process of a server's own."""
    program = Path(*command[:1]).name
    if program == "tritonserver":
        return program
    model = next((Path(part).parts for part in command if part.endswith("model.py")), ())
    return model[-3] if program.startswith("triton_python") and len(model) > 2 else None


def median(values: Sequence[float]) -> float:
    """The middle value; not a number of none."""
    return float(np.median(values)) if values else math.nan
