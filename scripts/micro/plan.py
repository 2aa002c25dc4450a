# SPDX-License-Identifier: Apache-2.0
"""Plan of one run: sizes and counts, handed to every child as JSON, and the names of the measurements."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from triton_omni.core.device import resolve_device
from triton_omni.core.settings import Quantization, Token2WavSettings

MIN_REPEATS = 3
"""Windows or replies of a figure, however long they take."""


@dataclass(frozen=True)
class Plan:
    """Sizes and counts of a run."""

    model: str
    """Checkpoint folder."""
    batches: tuple[int, ...] = (1, 8, 32, 64)
    """Sequences decoding together."""
    window_batches: tuple[int, ...] = (1, 8, 32)
    """Streams whose windows fall due together."""
    batch_frames: int = Token2WavSettings().max_batch_frames
    """Mel frames that are solved together at most."""
    offline_seconds: tuple[float, ...] = (10.0, 30.0)
    """Lengths of replies made in one piece."""
    media_seconds: float = 10.0
    """Seconds of the sound and the video in a prompt."""
    prompt_tokens: int = 100
    steps: int = 100
    """Decode steps that are timed."""
    repeats: int = 10
    """Windows and whole replies that are timed, at most."""
    seconds_a_figure: float = 8.0
    """No further window or reply is begun for a figure after so long; there are `MIN_REPEATS` in any case."""
    warm_up: int = 10
    """Steps before, not timed; windows and replies get a fifth of it."""
    reply_tokens: int = 150
    """Tokens of a whole reply by all stages."""
    codes: int = 1000
    """Codes of its speech, 50 a second."""
    enforce_eager: bool = False
    """No CUDA graphs, in ours and in plain vLLM alike."""
    torch_compile: bool = False
    """Networks compiled, in both alike."""
    fused_decode: bool = True
    """Our fused decode steps, where they can be; plain vLLM has none."""
    steady_decode: bool = True
    """Our thinker's decode steps laid out from the ones before."""
    prefix_caching: bool = False
    """Our thinker keeps what it computed of prompts. Nothing timed finds any of it: the time is that of keeping."""
    quantization: Quantization = "none"
    """Number format of both thinkers."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Plan:
        """The inverse of `to_json`."""
        lists = {field.name for field in fields(cls) if str(field.type).startswith("tuple")}
        typed: dict[str, Any] = {name: tuple(value) if name in lists else value for name, value in values.items()}
        return cls(**typed)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @property
    def warm_up_repeats(self) -> int:
        """Windows and replies made before the first timed one."""
        return max(1, self.warm_up // 5)


def device() -> torch.device:
    """The GPU where there is one, as the stages choose."""
    return torch.device("cuda", 0) if resolve_device("auto") == "cuda" else torch.device("cpu")


def timed(action: Callable[[], object], at: torch.device) -> float:
    """Seconds that `action` takes, the device's work included.

    The device is idle at both ends, so the time holds the host's launches as well as the kernels: what a caller who
    needs the result waits for. Events alone would leave the host's time out, and small batches are bound by it.
    """
    synchronize(at)
    begin = time.perf_counter()
    action()
    synchronize(at)
    return time.perf_counter() - begin


def repeated(plan: Plan, one: Callable[[], float]) -> list[float]:
    """Times that `one` returns, called as often as the plan says after its warm-up."""
    for _ in range(plan.warm_up_repeats):
        one()
    begin, times = time.perf_counter(), [one()]
    while len(times) < plan.repeats:
        if len(times) >= MIN_REPEATS and time.perf_counter() - begin > plan.seconds_a_figure:
            break
        times.append(one())
    return times


def synchronize(at: torch.device) -> None:
    """Wait until the device has done everything it was given."""
    if at.type == "cuda":
        torch.cuda.synchronize(at)
