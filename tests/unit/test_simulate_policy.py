# SPDX-License-Identifier: Apache-2.0
"""The model of three stages on one GPU: replies are whole, and each rule has the effect for which it is there."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from triton_omni.core.settings import StreamingPlan, Token2WavSettings
from triton_omni.policy.rules import wants_claim

ROOT = Path(__file__).parents[2]
RUNS = [json.loads((ROOT / f"docs/gpu-runs/2026-11-30-{run}.json").read_text("utf-8")) for run in ("b", "c")]
MEASURED = {name: figure for run in RUNS for name, figure in run["figures"].items()}
SHIPPED = Token2WavSettings()
MORE_SOUND, BEFORE = (
    Token2WavSettings(
        max_batch_frames=1200,
        plans={"balanced": StreamingPlan(look_ahead_codes=9, vocoder_context_frames=context)},
    )
    for context in (12, 18)
)
"""Settings of `more-sound` of these runs, and of the others."""


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from simulate_policy import costs, effects, server

    modules: dict[str, ModuleType] = {"costs": costs, "effects": effects, "server": server}
    return SimpleNamespace(**modules)


def effect(model: SimpleNamespace, load: str, rules: str, speech: Token2WavSettings = SHIPPED) -> Any:
    policies = model.effects.RULES_OFF[rules]
    return model.effects.simulate(model.effects.LOADS[load], model.costs.read_costs(), policies, speech)


# Without claims the model shows the delay of one stream, and too little of that of many.
@pytest.mark.parametrize(
    ("variant", "rules", "load"),
    [
        *(("no-gathering", "all", load) for load in ("one", "crowds", "listeners-48")),
        *(("more-sound", "all", load) for load in ("one", "crowds", "listeners-48")),
        ("no-claim", "no claim", "one"),
        *(("no-pause", "no pause", load) for load in ("one", "crowds", "listeners-48")),
        *(("no-urgent-batch", "no urgent batch", load) for load in ("one", "crowds", "listeners-48")),
    ],
)
def test_the_first_audio_is_within_a_fifth_of_what_a_gpu_took(
    model: SimpleNamespace, load: str, variant: str, rules: str
) -> None:
    of = {"one": model.effects.spread(1, 100, 0), "crowds": model.effects.spread(32, 300, 0)}
    requests = of.get(load) or model.effects.spread(96, 1000, 20_000 / 48)
    found = model.effects.simulate(
        model.effects.Load(requests),
        model.costs.read_costs(),
        model.effects.RULES_OFF[rules],
        MORE_SOUND if variant == "more-sound" else BEFORE,
    )
    for percentile, value in (("p50", found.first_audio_p50_ms), ("p95", found.first_audio_p95_ms)):
        if figure := MEASURED.get(f"first_audio_{percentile}/{variant}/{load}"):
            assert value == pytest.approx(statistics.median(figure["values"]), rel=0.2), percentile


def test_a_step_alone_takes_its_cost_and_longer_beside_others(model: SimpleNamespace) -> None:
    costs = model.costs.read_costs()
    assert costs.rate("token2wav", {"token2wav"}) == 1
    assert costs.rate("token2wav", {"token2wav", "thinker"}) == pytest.approx(1 / 1.36)
    assert costs.rate("token2wav", {"token2wav", "thinker", "talker"}) == pytest.approx(1 / 1.58)


@pytest.mark.parametrize("load", ["1 stream", "8 together"])
def test_every_reply_is_whole_and_in_order(model: SimpleNamespace, load: str) -> None:
    requests = model.effects.LOADS[load].requests
    replies = model.server.Server(model.costs.read_costs()).run(requests)
    assert [reply.given_frames for reply in replies] == [2 * request.codes for request in requests]
    for reply, request in zip(replies, requests, strict=True):
        assert sum(chunk.seconds for chunk in reply.chunks) == pytest.approx(request.codes * 0.02)
        times = [chunk.at_s for chunk in reply.chunks]
        assert times == sorted(times)
        assert reply.codes <= request.codes


def test_longer_prompts_delay_the_first_audio_of_a_crowd_by_their_prefill(model: SimpleNamespace) -> None:
    costs, policies = model.costs.read_costs(), model.effects.RULES_OFF["all"]
    short, long = (
        model.effects.simulate(model.effects.LOADS["32 together"].prompted(tokens), costs, policies)
        for tokens in (100, 220)
    )
    assert short == effect(model, "32 together", "all")
    prefill_ms = 32 * (220 - 100) * costs.thinker_token_ms
    assert prefill_ms < long.first_audio_p50_ms - short.first_audio_p50_ms < 2 * prefill_ms


@pytest.mark.parametrize("load", ["1 stream", "8 together"])
def test_claims_bring_the_first_audio_sooner(model: SimpleNamespace, load: str) -> None:
    shipped, off = effect(model, load, "all"), effect(model, load, "no claim")
    assert off.first_audio_p50_ms > 1.05 * shipped.first_audio_p50_ms


def test_claims_keep_gaps_short_beside_many_listeners(model: SimpleNamespace) -> None:
    claiming, off = (effect(model, "48 listen", rules, BEFORE) for rules in ("all", "no claim"))
    assert off.silence_s > 10 * claiming.silence_s
    assert off.first_audio_p95_ms > 1.2 * claiming.first_audio_p95_ms


def test_more_sound_in_a_first_chunk_ends_gaps_beside_many_listeners(model: SimpleNamespace) -> None:
    more, less = (effect(model, "48 listen", "all", speech) for speech in (MORE_SOUND, BEFORE))
    assert more.replies_with_gaps <= 2 < less.replies_with_gaps


def test_a_shorter_look_ahead_brings_the_first_audio_sooner_without_gaps(model: SimpleNamespace) -> None:
    for load in ("1 stream", "48 listen"):
        shipped, longer = effect(model, load, "all"), effect(model, load, "all", MORE_SOUND)
        assert shipped.first_audio_p50_ms < longer.first_audio_p50_ms
        assert shipped.silence_s < 0.1


@pytest.mark.parametrize("load", ["1 stream", "8 together"])
def test_pauses_bring_the_first_audio_sooner(model: SimpleNamespace, load: str) -> None:
    shipped, off = effect(model, load, "all"), effect(model, load, "no pause")
    assert off.first_audio_p50_ms > shipped.first_audio_p50_ms


def test_urgent_batches_keep_gaps_short(model: SimpleNamespace) -> None:
    shipped, off = effect(model, "32 together", "all"), effect(model, "32 together", "no urgent batch")
    assert off.silence_s > 1.5 * shipped.silence_s
    assert off.speech_per_second < shipped.speech_per_second


def test_claims_beside_first_codes_would_delay_requests_that_follow(
    model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = effect(model, "32 ask again", "all")
    monkeypatch.setattr(model.server, "wants_claim", lambda seen: wants_claim(replace(seen, awaited=0)))
    claiming = effect(model, "32 ask again", "all")
    assert claiming.first_audio_p50_ms > 1.1 * shipped.first_audio_p50_ms
