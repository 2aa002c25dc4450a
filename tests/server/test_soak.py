# SPDX-License-Identifier: Apache-2.0
"""The soak in short: some hundreds of requests of all kinds, more at once than there are sessions, a stage killed."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

import pytest

from server.serving import NEVER_S, ROOT, STOP_S, TINY, Settings, server_config
from triton_omni.session.ledger_table import STAGES
from triton_omni_client.messages import UNARY_MODEL

REQUESTS = 150
TURNS = 0.4
"""Share of turns of conversations."""
CACHING: Settings = {
    **TINY,
    **{stage: {**TINY[stage], "prefix_caching": True} for stage in ("thinker", "talker")},
}
PROCESSES = {"tritonserver", UNARY_MODEL, *STAGES}
SAMPLE_EVERY_S = 0.2
"""Some ten seconds are left after the kill: at one sample a second no line would be fitted."""
GROWTH_MIB = 64
"""Most growth of a process in the half of the requests after the kill: caches still fill, by up to 22 MiB in three
runs (the thinker's). Some eighty requests that keep a megabyte each are found."""


def test_a_short_soak_finds_nothing(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    running, judging, plan, report = (
        importlib.import_module(f"soak.{name}") for name in ("running", "judging", "plan", "report")
    )
    # Times depend on the machine's other work.
    for module, name, limit in (
        (judging, "STOP_S", STOP_S),
        (judging, "_AUDIO_MOMENT_S", STOP_S),
        (running, "_IDLE_WITHIN_S", NEVER_S),
    ):
        monkeypatch.setattr(module, name, limit)
    options = running.Options(
        REQUESTS,
        concurrency=9,
        shares=plan.Shares(turns=TURNS),
        kills=1,
        seed=2,
        sample_every_s=SAMPLE_EVERY_S,
        growth_allowed_mib=GROWTH_MIB,
    )
    soaked = running.soak(server_config(tmp_path, tiny_checkpoint, CACHING), options)
    assert judging.faults(soaked) == []
    assert {growth.name for growth in soaked.growths()} == PROCESSES
    assert sorted(ended.planned.number for ended in soaked.ended) == list(range(REQUESTS))
    asked = Counter(ended.planned.fate for ended in soaked.ended)
    assert set(asked) == {"whole", "cancelled", "malformed", "slow", "hurried"}
    assert {ended.planned.way for ended in soaked.ended} == {"grpc stream", "http stream", "grpc unary", "http unary"}
    assert sum(ended.planned.is_turn for ended in soaked.ended) > REQUESTS / 5
    (kill,) = soaked.kills
    assert kill.stage == "token2wav"
    finished = [ended for ended in soaked.ended if ended.outcome == "finished"]
    assert min(ended.ended for ended in finished) < kill.killed
    # Requests are refused while the killed stage loads: on a slow machine a good part of them.
    assert sum(ended.began > kill.back for ended in finished) > REQUESTS / 10
    written = report.write(soaked, tmp_path / "out")
    assert [path.name for path in written] == ["soak.json", "soak.png"]
    assert all(path.stat().st_size for path in written)
