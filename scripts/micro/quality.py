# SPDX-License-Identifier: Apache-2.0
"""Signal-to-noise ratios of token2wav's faster ways against its exact one.

The same codes, voice and noise go through engines that differ in one thing. The ratio is of the waveforms, in decibels;
with random weights it says how far the arithmetic is off, not how speech sounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from triton_omni.checkpoint.config import load_config
from triton_omni.checkpoint.speakers import load_speakers
from triton_omni.core.settings import Token2WavSettings
from triton_omni.session.engine import StreamOptions
from triton_omni.token2wav.engine import Token2WavEngine
from triton_omni.token2wav.networks import resolve_dtype

from .figures import OURS, READY, Metric
from .plan import Plan
from .speech import codes_of

CODES = 240
"""Codes of a reply, 4.8 s: seven windows of the plan `balanced`."""
REPLIES = 3


def quality(plan: Plan, at: torch.device) -> Iterator[Mapping[str, Any]]:
    """Streams of each plan against whole replies, both in float32; then the GPU's dtype against float32."""
    yield READY
    whole = waveforms(plan, at, Token2WavSettings(dtype="float32"), "offline")
    streamed = {
        name: waveforms(plan, at, Token2WavSettings(dtype="float32", plan=name), "streaming")
        for name in Token2WavSettings().plans
    }
    for name, replies in streamed.items():
        yield _figure({"plan": name, "against": "offline"}, replies, whole)
    dtype = resolve_dtype("auto", at)
    if dtype != torch.float32:
        settings = Token2WavSettings()
        fast = waveforms(plan, at, settings, "streaming")
        labels = {"dtype": str(dtype).removeprefix("torch."), "against": "float32", "plan": settings.plan}
        yield _figure(labels, fast, streamed[settings.plan])


def waveforms(
    plan: Plan, at: torch.device, settings: Token2WavSettings, mode: Literal["streaming", "offline"]
) -> list[Tensor]:
    """Replies of one engine, [S] fp32 each, by seed."""
    engine = Token2WavEngine(Path(plan.model), settings, at)
    voice = load_speakers(Path(plan.model), load_config(Path(plan.model))).default.name
    replies = []
    for seed in range(REPLIES):
        engine.open("reply", voice, seed, StreamOptions(mode=mode))
        engine.feed("reply", codes_of(plan, CODES, seed).to(at))
        engine.end("reply")
        chunks = []
        while engine.has_work():
            chunks += [output.samples for output in engine.step()]
        replies.append(torch.cat(chunks))
    engine.close()
    return replies


def decibel(reference: Tensor, other: Tensor) -> float:
    """Power of `reference` over that of its difference to `other`."""
    return float(10 * torch.log10(reference.square().sum() / (reference - other).square().sum()))


def _figure(labels: Mapping[str, Any], replies: list[Tensor], references: list[Tensor]) -> dict[str, Any]:
    ratios = tuple(decibel(reference, reply) for reference, reply in zip(references, replies, strict=True))
    return Metric("token2wav_snr", OURS, labels, "dB", ratios).summary()
