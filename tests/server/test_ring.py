# SPDX-License-Identifier: Apache-2.0
"""Rows and codes that go by rings, past Triton, are those that go by its messages: HF's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from reference.hf import HfReference
from server.parity import GREEDY, SYSTEM, assert_equals_hf, check_reply, hf_reply
from server.serving import TINY, Served, serve
from triton_omni.ledger_layout import server_name, table_path
from triton_omni_client import Request

SETTINGS = {**TINY, **{stage: {**TINY[stage], "ring": True} for stage in ("talker", "token2wav")}}
STREAMS = 8


@pytest.fixture(scope="module")
def by_ring(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose stages share memory; its stop leaves none of it."""
    with serve(tmp_path_factory.mktemp("ring"), tiny_checkpoint, SETTINGS) as server:
        table = table_path(server_name(server.supervisor.pid))
        assert len(list(table.parent.glob(f"{table.name}.*-ring"))) == 2
        yield server
        server.wait_until_idle()
        server.stop()
        assert not list(table.parent.glob(f"{table.name}*"))


def test_a_reply_equals_hf_and_its_rows_and_codes_went_by_the_ring(by_ring: Served, hf: HfReference) -> None:
    text = "Tell me a story about a ship. " * 12
    expected = hf_reply(hf, hf.prepare([SYSTEM, {"role": "user", "content": text}]), "Ethan")
    assert_equals_hf(by_ring, hf, Request(text=text, voice="Ethan", seed=7, request_id="ring", **GREEDY), expected)
    placed = [by_ring.records.of("ring", stage, "placed") for stage in ("talker", "token2wav")]
    reply = len(expected.reply.thinker.token_ids)
    assert sum(event["rows"] for event in placed[0]) == reply - 2, (
        "but for the first row, which comes with the prompt's"
    )
    assert sum(len(event["codes"]) for event in placed[1]) == len(expected.reply.talker.codes)
    by_ring.wait_until_idle()
    assert any('tensor="ring"' in name and size > 0 for name, size in by_ring.link_bytes().items())


def test_many_at_once_get_what_one_gets(by_ring: Served, hf: HfReference) -> None:
    requests = [
        Request(text="hello " * (1 + n), voice="Chelsie", seed=n, request_id=f"ring {n}", **GREEDY)
        for n in range(STREAMS)
    ]
    with ThreadPoolExecutor(STREAMS) as pool:
        replies = list(pool.map(lambda request: by_ring.client.stream(request).collect(), requests))
    for request, reply in zip(requests, replies, strict=True):
        chat = [SYSTEM, {"role": "user", "content": request.text}]
        check_reply(by_ring, hf, request, reply, hf_reply(hf, hf.prepare(chat), "Chelsie"))
