# SPDX-License-Identifier: Apache-2.0
"""Stages on two GPUs: rows and codes cross between devices, and replies are HF's as on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from reference.hf import HfReference
from server.asking import ask_together
from server.parity import GREEDY, check_reply, hf_reply
from server.serving import Served, serve
from server.test_mixed_media import CHATS
from triton_omni.core.device import gpu_count
from triton_omni.supervisor.served_repository import parse_placement

AT_ONCE = ("all kinds between words", "a film that is heard")
pytestmark = pytest.mark.skipif(gpu_count() < 2, reason="stages are put on two GPUs")


@pytest.fixture(scope="module", params=["talker=1", "thinker=1,talker=1,token2wav=1"], ids=["both ways", "all on 1"])
def placed(
    request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    placement = parse_placement(request.param)
    with serve(tmp_path_factory.mktemp("placed"), tiny_checkpoint, placement=placement) as server:
        yield server


def test_replies_are_hf_s_wherever_the_stages_are(placed: Served, hf: HfReference) -> None:
    expected = {name: hf_reply(hf, CHATS[name].hf_inputs(hf), "Ethan") for name in AT_ONCE}
    requests = {
        name: CHATS[name].request(voice="Ethan", seed=seed, request_id=f"placed: {name}", **GREEDY)
        for seed, name in enumerate(AT_ONCE)
    }
    replies = ask_together(placed, requests)
    for name in AT_ONCE:
        check_reply(placed, hf, requests[name], replies[name], expected[name])
    assert all('device="cuda"' in name for name in placed.link_bytes()), "rows or codes went through the host"
