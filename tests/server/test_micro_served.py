# SPDX-License-Identifier: Apache-2.0
"""The micro benchmark's replies through Triton: of the plan's lengths, with what each hop took."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from server.serving import ROOT, Served


def test_replies_through_triton_have_the_plans_lengths_and_their_hops(
    server: Served, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    plan = importlib.import_module("micro.plan").Plan(
        str(tiny_checkpoint), prompt_tokens=40, reply_tokens=20, codes=60, repeats=2, warm_up=5
    )
    served = importlib.import_module("micro.served")
    metrics_url = f"http://{server.supervisor.metrics_url}/metrics"
    text, audio, whole, *hops = served.replies_and_hops(server.client, metrics_url, plan)
    lengths = {"prompt_tokens": 40, "reply_tokens": 20, "codes": 60}
    assert [figure["parameters"] for figure in (text, audio, whole)] == [lengths] * 3
    assert 0 < text["p50"] < audio["p50"] < whole["p50"]
    assert [figure["parameters"] for figure in hops] == [
        {"to": stage, "until": until} for stage in ("talker", "token2wav") for until in ("arrived", "taken")
    ]
    assert all(0 < figure["min"] <= figure["max"] < whole["max"] for figure in hops)
