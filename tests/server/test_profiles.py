# SPDX-License-Identifier: Apache-2.0
"""A server under the profile `small`: what it tells, what its stages have, and what they keep after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.conversations import kill
from server.serving import TINY, Served, serve
from triton_omni.core.profile import load_profile
from triton_omni.session.ledger_table import STAGES
from triton_omni.supervisor.served_repository import stage_settings
from triton_omni_client.messages import MODEL

CPU_BLOCK = 32
"""Tokens of a block of the KV cache."""
PAGES = 24
"""Pages of a stream's window cache: three steps of four evaluations, twice for guidance."""


def of_stages(server: Served, metric: str) -> dict[str, float]:
    found = server.metrics(metric)
    return {stage: value for name, value in found.items() for stage in STAGES if f'stage="{stage}"' in name}


@pytest.mark.timeout(900)
def test_small_serves_with_its_own_settings_and_keeps_them_when_a_stage_restarts(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    profile = load_profile("small")
    many = {"thinker": {**TINY["thinker"], "max_sessions": 30}, "talker": {**TINY["talker"], "max_sessions": 30}}
    with serve(tmp_path, tiny_checkpoint, {**TINY, **many}, profile=profile) as server:
        wanted = stage_settings(server.supervisor.config.model_repository, profile)
        limits = next(model.limits for model in server.client.models() if model.name == MODEL)
        assert limits is not None
        assert (limits["max_sessions"], limits["max_prompt_tokens"]) == (8, wanted.thinker.engine.max_model_len - 1)
        assert limits["max_codes"] == TINY["talker"]["max_codes"], "the profile does not name it"
        first = server.ask("small: first", "hello", seed=3, talker={"temperature": 0})
        assert first.audio.size
        kill(server, "talker")
        again = server.ask("small: again", "hello", seed=3, talker={"temperature": 0})
        assert (again.text, again.audio.size) == (first.text, first.audio.size)
        assert of_stages(server, "omni_sessions_limit") == {"thinker": 8}
        assert of_stages(server, "omni_kv_blocks_limit") == {
            "thinker": wanted.thinker.engine.kv_cache_tokens / CPU_BLOCK,
            "talker": wanted.talker.engine.kv_cache_tokens / CPU_BLOCK,
            "token2wav": wanted.token2wav.max_streams * PAGES,
        }
