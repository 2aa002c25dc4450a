# SPDX-License-Identifier: Apache-2.0
"""Watches the server's machine during a run: GPUs by NVML where the server is local, stages by Triton's metrics.

A source that gives no answer is named in one note and left out.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

from . import triton_metrics
from .nvml import Nvml, NvmlError

INTERVAL_S = 0.5
DEFAULT_METRICS_PORT = 8002
_LOCAL = ("localhost", "127.0.0.1", "::1")

Probe = Callable[[], Mapping[str, float]]


@dataclass(frozen=True)
class Usage:
    """One figure during a run."""

    mean: float
    max: float


@dataclass
class Monitor:
    """Samples figures on a thread of its own while it is entered; `take` gives those of the time since the last."""

    probes: dict[str, Probe] = field(default_factory=dict)
    """By what they ask; one that fails is dropped with a note."""
    notes: list[str] = field(default_factory=list)
    interval_s: float = INTERVAL_S

    def __post_init__(self) -> None:
        self._samples: defaultdict[str, list[float]] = defaultdict(list)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-resources", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def take(self) -> dict[str, Usage]:
        """Mean and peak of each figure since the last call."""
        with self._lock:
            samples, self._samples = self._samples, defaultdict(list)
        return {name: Usage(sum(values) / len(values), max(values)) for name, values in sorted(samples.items())}

    def _run(self) -> None:
        while not self._stopping.wait(self.interval_s):
            for name in list(self.probes):
                self._ask(name)

    def _ask(self, name: str) -> None:
        try:
            found = self.probes[name]()
        except (OSError, ValueError) as error:
            del self.probes[name]
            self.notes.append(f"{name} stopped answering: {error}")
            return
        with self._lock:
            for figure, value in found.items():
                self._samples[figure].append(value)


def is_local(url: str) -> bool:
    """True if a gRPC address is on this machine."""
    return urlsplit(f"//{url}").hostname in _LOCAL


def default_metrics_url(url: str) -> str:
    """Triton's own metrics address beside a gRPC address."""
    host = urlsplit(f"//{url}").hostname or "localhost"
    return f"http://{f'[{host}]' if ':' in host else host}:{DEFAULT_METRICS_PORT}/metrics"


def find_monitor(url: str, metrics_url: str, stack: ExitStack) -> tuple[Monitor, list[str]]:
    """A monitor of all that can be asked about the server at `url`, and the names of its GPUs.

    Args:
        url: gRPC address of the server.
        metrics_url: of Triton's metrics.
        stack: closes what is opened here.
    """
    monitor = Monitor()
    nvml = _nvml(url, monitor.notes, stack)
    if nvml is not None:
        monitor.probes["NVML"] = nvml.sample

    def metrics() -> dict[str, float]:
        found = triton_metrics.read(triton_metrics.fetch(metrics_url))
        # NVML says the same of a GPU, and by stage.
        return found if nvml is None else {name: value for name, value in found.items() if not name.startswith("gpu/")}

    try:
        metrics()
        monitor.probes[f"Triton's metrics at {metrics_url}"] = metrics
    except (OSError, ValueError) as error:
        monitor.notes.append(f"no sessions and queues by stage: {metrics_url} (--metrics-url): {error}")
    return monitor, [] if nvml is None else nvml.gpus()


def _nvml(url: str, notes: list[str], stack: ExitStack) -> Nvml | None:
    if not is_local(url):
        notes.append("GPU memory and utilisation not by stage: the server is on another machine")
        return None
    try:
        return stack.enter_context(Nvml())
    except NvmlError as error:
        notes.append(f"no GPU memory and utilisation by stage: {error}")
        return None
