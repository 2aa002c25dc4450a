# SPDX-License-Identifier: Apache-2.0
"""As many requests as a server takes, and more: who has a place keeps it, who has none hears so at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from server.serving import TINY, Served
from triton_omni_client import BadRequest, Request

SESSIONS: int = TINY["thinker"]["max_sessions"]
SHORT = {"modalities": ["text"], "thinker": {"max_tokens": 2}}

Ask = Callable[[Served, Request], object]


def streamed(server: Served, request: Request) -> None:
    server.client.stream(request).collect()


def unary(server: Served, request: Request) -> None:
    server.http.unary(request)


def refused(server: Served, request: Request) -> None:
    """A request that ends with a refusal of its own, which another may follow as soon as that is told."""
    with pytest.raises(BadRequest, match="is not one of"):
        server.client.stream(replace(request, voice="nobody")).collect()


@pytest.mark.parametrize("asks", [(streamed,), (unary,), (streamed, refused)])
def test_a_closed_loop_of_as_many_clients_as_sessions_is_never_refused(server: Served, asks: Sequence[Ask]) -> None:
    def client(number: int) -> None:
        for turn in range(25):
            request = Request(text="hello", seed=number, request_id=f"loop {number} {turn}", **SHORT)
            asks[turn % len(asks)](server, request)

    with ThreadPoolExecutor(SESSIONS) as pool:
        for ended in [pool.submit(client, number) for number in range(SESSIONS)]:
            ended.result()
