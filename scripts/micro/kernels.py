# SPDX-License-Identifier: Apache-2.0
"""Where the time of streaming windows goes, by kernel: torch's profiler over whole steps of the engine.

On a GPU these are the kernels of the recorded passes, one by one, and they run as without the profiler. A kernel that
is launched early overlaps the one before it, so their sum can exceed the window. Without a GPU they are PyTorch's
operators.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from triton_omni.token2wav.engine import Token2WavEngine

from .figures import OURS, READY, milliseconds
from .plan import Plan, synchronize, timed
from .speech import REFERENCE, WindowStreams, window_settings

SHOWN: Final = 15
"""Kernels that are named, the longest first; all others are one figure."""
OTHERS: Final = "all others"
NAME_LENGTH: Final = 60

Window = Mapping[str, Sequence[float]]
"""Seconds of each launch of a kernel, by its name."""


def kernels(plan: Plan, at: torch.device) -> Iterator[Mapping[str, Any]]:
    """Seconds by kernel of one window alone and of most streams' windows together, and as a whole."""
    engine = Token2WavEngine(Path(plan.model), window_settings(plan), at)
    yield READY
    for batch in sorted({1, max(plan.window_batches)}):
        yield from _of_batch(engine, plan, batch, at)
    engine.close()


def _of_batch(engine: Token2WavEngine, plan: Plan, batch: int, at: torch.device) -> Iterator[Mapping[str, Any]]:
    whole, windows = [], []
    with WindowStreams(engine, plan, batch, REFERENCE) as streams:
        for number in range(plan.warm_up_repeats + plan.repeats):
            streams.feed()
            seconds, launches = _profiled(streams, at)
            if number >= plan.warm_up_repeats:
                whole.append(seconds)
                windows.append(launches)
    yield milliseconds("token2wav_window_profiled", OURS, whole, {"batch": batch})
    yield from by_kernel(windows, batch)


def by_kernel(windows: Sequence[Window], batch: int) -> Iterator[Mapping[str, Any]]:
    """A figure a kernel, of its seconds in each window; those that take longest first, all others last."""
    sums = [{name: sum(times) for name, times in window.items()} for window in windows]
    order = sorted({name for window in sums for name in window}, key=lambda name: -sum(w.get(name, 0.0) for w in sums))
    for names, shown in [*(([name], name) for name in order[:SHOWN]), (order[SHOWN:], OTHERS)]:
        if names:
            launches = max(sum(len(window.get(name, ())) for name in names) for window in windows)
            seconds = [sum(window.get(name, 0.0) for name in names) for window in sums]
            yield milliseconds(
                "token2wav_kernel", OURS, seconds, {"batch": batch, "kernel": shown, "launches": launches}
            )


def _profiled(streams: WindowStreams, at: torch.device) -> tuple[float, Window]:
    """Seconds of one window, and of each launch in it."""
    synchronize(at)
    on_gpu = at.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        seconds = timed(streams.step, at)
    launches: defaultdict[str, list[float]] = defaultdict(list)
    for event in found.events() or ():
        if on_gpu:
            spent = event.time_range.elapsed_us() if event.device_type.name == "CUDA" else 0.0
        else:
            spent = event.self_cpu_time_total
        if spent > 0:
            launches[_short(event.name)].append(spent * 1e-6)
    return seconds, launches


def _short(name: str) -> str:
    """A kernel's name without what its template was filled with."""
    name = re.sub(r"^void ", "", name)
    return re.split(r"[<(]", name)[0][:NAME_LENGTH] or name[:NAME_LENGTH]
