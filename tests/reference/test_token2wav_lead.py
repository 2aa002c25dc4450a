# SPDX-License-Identifier: Apache-2.0
"""Streams that may be only so far ahead of their listeners: the same sound, made no faster than it is heard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_token2wav import DEVICE, lent
from torch import Tensor

from triton_omni.core.errors import BadRequest
from triton_omni.core.settings import DiffusionSettings, StreamingPlan, Token2WavSettings
from triton_omni.request.parse import Token2WavOptions
from triton_omni.session.engine import StreamOptions
from triton_omni.token2wav import streaming
from triton_omni.token2wav.engine import Token2WavEngine

CODES = torch.randint(190, (240,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
"""4.8 s of speech."""
CODE_NS = 20_000_000
CHUNK_NS = 480_000_000
"""The longest chunk of the plan below."""
LEAD_NS = 1_000_000_000
TICK_NS = 50_000_000
SETTINGS = Token2WavSettings(
    dtype="float32",
    plans={"balanced": StreamingPlan(chunk_blocks=(1, 2))},
    diffusion=DiffusionSettings(solver="euler", num_steps=5),
    max_codes=400,
    max_streams=2,
)
PACED = StreamOptions(max_lead_s=LEAD_NS / 1e9)


@dataclass
class Clock:
    """The streams' monotonic clock, which stands still by itself."""

    ns: int = 1_000_000_000_000

    def monotonic_ns(self) -> int:
        return self.ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(streaming, "time", SimpleNamespace(monotonic_ns=clock.monotonic_ns))
    return clock


@pytest.fixture(scope="module")
def shared_engine(tiny_checkpoint: Path) -> Token2WavEngine:
    return Token2WavEngine(tiny_checkpoint, SETTINGS, DEVICE)


@pytest.fixture
def engine(shared_engine: Token2WavEngine) -> Iterator[Token2WavEngine]:
    yield from lent(shared_engine)


def begin(engine: Token2WavEngine, key: str, options: StreamOptions) -> None:
    engine.open(key, "Ethan", 1, options)
    engine.feed(key, CODES)
    engine.end(key)


def all_due(engine: Token2WavEngine) -> dict[str, Tensor]:
    """The sound of every stream for which there is work now."""
    sounds: dict[str, list[Tensor]] = {}
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            sounds.setdefault(output.key, []).append(output.samples)
    return {key: torch.cat(parts) for key, parts in sounds.items()}


def test_it_is_made_as_it_is_heard_and_is_the_same(engine: Token2WavEngine, clock: Clock) -> None:
    begin(engine, "free", StreamOptions())
    free, began_ns = all_due(engine)["free"], clock.ns
    begin(engine, "paced", PACED)
    parts = [all_due(engine)["paced"]]
    while "paced" in engine._streams:
        # Never further ahead than the lead and the chunk that it let begin, and never so late as to fall silent.
        ahead_ns = sum(map(len, parts)) * 1_000_000_000 // 24_000 - (clock.ns - began_ns)
        assert LEAD_NS < ahead_ns <= LEAD_NS + CHUNK_NS
        clock.ns += TICK_NS
        parts.append(all_due(engine).get("paced", torch.empty(0)))
    assert clock.ns - began_ns >= len(CODES) * CODE_NS - LEAD_NS - CHUNK_NS
    torch.testing.assert_close(torch.cat(parts), free, atol=1e-5, rtol=0)


def test_it_holds_nobody_up_who_has_no_lead(engine: Token2WavEngine, clock: Clock) -> None:
    del clock
    begin(engine, "paced", PACED)
    begin(engine, "free", StreamOptions())
    made = all_due(engine)
    assert len(made["free"]) == len(CODES) * 480 > len(made["paced"]) > 0
    assert engine.stats().waiting == 0
    assert not engine.wants_claim
    engine.abort("paced")


def test_a_whole_reply_in_one_piece_has_no_lead(engine: Token2WavEngine, clock: Clock) -> None:
    del clock
    begin(engine, "whole", StreamOptions(mode="offline", max_lead_s=1.0))
    assert len(all_due(engine)["whole"]) == len(CODES) * 480


def test_a_deployment_may_set_the_lead_and_a_request_another(
    engine: Token2WavEngine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    del clock
    monkeypatch.setattr(engine, "_settings", SETTINGS.model_copy(update={"max_lead_s": 1.0}))
    begin(engine, "as deployed", StreamOptions())
    begin(engine, "as asked", StreamOptions(max_lead_s=3.0))
    made = all_due(engine)
    assert 24_000 <= len(made["as deployed"]) < 1.5 * 24_000 < 3 * 24_000 <= len(made["as asked"]) < 3.5 * 24_000
    for key in made:
        engine.abort(key)


@pytest.mark.parametrize("lead", [0.5, -1, 121, float("nan")])
def test_a_lead_out_of_range_is_refused(lead: Any) -> None:
    with pytest.raises((ValueError, BadRequest), match="max_lead_s"):
        Token2WavOptions.model_validate({"max_lead_s": lead})
