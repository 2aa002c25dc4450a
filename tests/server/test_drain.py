# SPDX-License-Identifier: Apache-2.0
"""A server that is told to stop finishes what it has begun, takes nothing new, and says so; told twice, it stops."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from server.asking import BATCH_TOLERANCE
from server.commands import command
from server.probes import SLOW_THINKER
from server.serving import wait_for
from triton_omni_client import Overloaded, Reply, Request

STOP_S = 10.0
LATER_S = 1.2
"""After this a second signal is no echo of the first."""
WHOLE = Request(text="hello", seed=7, talker={"temperature": 0}, thinker={"min_tokens": 60, "max_tokens": 60})
ENDLESS = Request(text="hello", seed=SLOW_THINKER, thinker={"min_tokens": 250, "max_tokens": 250})
"""Ten seconds of text alone, and a slower thinker for all."""


def test_replies_run_through_a_stop_to_their_end_and_new_requests_are_refused(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    with command(tmp_path, tiny_checkpoint) as server, ThreadPoolExecutor(4) as pool:
        before = server.client.stream(WHOLE).collect()
        endless = server.client.stream(ENDLESS)
        next(endless)
        streamed = pool.submit(server.client.stream(WHOLE).collect)
        by_http, unary = pool.submit(server.generate_stream, WHOLE), pool.submit(server.http.unary, WHOLE)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        told_at = time.monotonic()
        wait_for(lambda: not server.is_ready(), lambda: "still ready", 2)
        for ask in (server.client.stream(WHOLE).collect, lambda: server.http.unary(WHOLE)):
            with pytest.raises(Overloaded, match="the server is shutting down") as refusal:
                ask()
            assert refusal.value.retry_after_ms
        assert not any(reply.done() for reply in (streamed, by_http, unary)), "the stop came too late for this test"
        for reply in (streamed.result(), unary.result()):
            assert_same(reply, before)
        assert by_http.result() == before.text
        assert time.monotonic() > told_at + LATER_S
        assert not server.is_ready()
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(Overloaded, match="the server is shutting down"):
            endless.collect()
        assert server.process.wait(STOP_S) == 128 + signal.SIGTERM
        assert "4 replies are under way and get 60 s at most, the whole stop 98 s" in server.process.stderr.read()


def assert_same(reply: Reply, expected: Reply) -> None:
    assert reply.text == expected.text
    assert len(reply.audio) > 0
    np.testing.assert_allclose(reply.audio, expected.audio, rtol=0, atol=BATCH_TOLERANCE)
