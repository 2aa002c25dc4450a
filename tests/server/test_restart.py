# SPDX-License-Identifier: Apache-2.0
"""A server that is killed together with its supervisor leaves nothing, and can be started again where it was.

A server that was started again finishes its replies when it is told to stop, takes nothing new, and says so. Told
twice, it stops.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from processes import children, is_running
from server.asking import BATCH_TOLERANCE
from server.commands import DRAIN_S, Command, command
from server.probes import CRAWLING_THINKER
from server.serving import wait_for
from triton_omni.session.ledger_table import STAGES
from triton_omni.session.ledger_view import StageBoard
from triton_omni.session.server_folder import ledger_name
from triton_omni.supervisor.leftovers import members
from triton_omni.supervisor.machine import choose_ports
from triton_omni_client import ConnectionFailed, Overloaded, Reply, Request

STOP_S = 100.0
"""Most seconds of a stop that waits for no reply: replies would have `DRAIN_S`."""
LATER_S = 1.2
"""After this a second signal is no echo of the first."""
ASKED = Request(text="hello", seed=7, talker={"temperature": 0}, thinker={"min_tokens": 20, "max_tokens": 20})
WHOLE = Request(text="hello", seed=7, talker={"temperature": 0}, thinker={"min_tokens": 60, "max_tokens": 60})
ENDLESS = Request(text="hello", seed=CRAWLING_THINKER, thinker={"min_tokens": 250, "max_tokens": 250})
"""Half a minute of text alone, and a slower thinker for all."""


class Place:
    """The ports on which one server runs after another."""

    def __init__(self, checkpoint: Path, factory: pytest.TempPathFactory, running: ExitStack) -> None:
        self._checkpoint, self._factory, self._running = checkpoint, factory, running
        self._ports = choose_ports("127.0.0.1", dict.fromkeys(("http", "grpc", "metrics"), 0))
        self._last: Command | None = None

    def start(self) -> Command:
        """A new server."""
        running = command(self._factory.mktemp("place"), self._checkpoint, self._ports)
        self._last = self._running.enter_context(running)
        return self._last

    def last(self) -> Command:
        """The last that was started, or the first."""
        return self._last or self.start()


@pytest.fixture(scope="module")
def place(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with ExitStack() as running:
        yield Place(tiny_checkpoint, tmp_path_factory, running)


def server_of(running: Command) -> int:
    """Process id of its tritonserver, the first that it started."""
    return children(running.process.pid)[0]


def shared_memory_of(running: Command, server: int) -> set[Path]:
    """The session ledger and the regions of a server, by the process ids in their names."""
    files = set(Path("/dev/shm").glob(f"triton*omni*-{server}-*"))
    return files | set(Path("/dev/shm").glob(f"triton_omni_*-{running.process.pid}-*"))


def test_a_server_killed_with_its_supervisor_leaves_nothing_and_starts_again(place: Place) -> None:
    first = place.start()
    before = first.client.stream(ASKED).collect()
    stream = first.client.stream(ENDLESS)
    next(stream)
    server = server_of(first)
    processes = members(server)
    assert len(processes) == 1 + len(STAGES) + 2, "tritonserver, its stages, the unary model, and the decoders' server"
    assert len(shared_memory_of(first, server)) > len(STAGES)
    # At once, as where memory runs out: the supervisor first, so that it cannot tidy up.
    os.kill(first.process.pid, signal.SIGKILL)
    os.kill(server, signal.SIGKILL)
    with pytest.raises(ConnectionFailed):
        stream.collect()
    wait_for(lambda: not any(map(is_running, processes)), lambda: processes)
    wait_for(lambda: not shared_memory_of(first, server), lambda: shared_memory_of(first, server))
    assert_same(place.start().client.stream(ASKED).collect(), before)


def test_replies_run_through_a_stop_to_their_end_and_new_requests_are_refused(place: Place) -> None:
    """The last test of this module."""
    server = place.last()
    with ThreadPoolExecutor(4) as pool, closing(StageBoard(ledger_name(server_of(server)))) as board:
        before = server.client.stream(WHOLE).collect()
        endless = server.client.stream(ENDLESS)
        next(endless)
        streamed = pool.submit(server.client.stream(WHOLE).collect)
        by_http, unary = pool.submit(server.generate_stream, WHOLE), pool.submit(server.http.unary, WHOLE)
        wait_for(lambda: board.open_sessions() == 4, board.open_sessions)
        server.process.send_signal(signal.SIGTERM)
        told_at = time.monotonic()
        wait_for(lambda: not server.is_ready(), lambda: "still ready")
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
        assert (
            f"open replies: 4, which get {DRAIN_S} s at most, the whole stop {DRAIN_S + 38} s"
            in server.process.stderr.read()
        )


def assert_same(reply: Reply, expected: Reply) -> None:
    assert reply.text == expected.text
    assert len(reply.audio) > 0
    np.testing.assert_allclose(reply.audio, expected.audio, rtol=0, atol=BATCH_TOLERANCE)
