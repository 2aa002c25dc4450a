# SPDX-License-Identifier: Apache-2.0
"""If Triton gives no error for a dead process's requests, the server ends at once and starts again on its ports.

Newer Tritons need this after each death, so these tests choose it. Every Triton needs it if the unary model had
requests, or all stages died.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway_fakes import NOT_NOW, RunningGateway, run_gateway
from realtime_client import MANUAL, talk
from server.asking import BATCH_TOLERANCE
from server.parity import GREEDY
from server.probes import CRAWLING_THINKER
from server.serving import BACK_WITHIN_S, NEVER_S, TINY, Served, held_back, serve, wait_for
from triton_omni.core.errors import StageName
from triton_omni.session.ledger_table import PID
from triton_omni.session.ledger_view import StageBoard
from triton_omni.session.server_folder import ledger_name
from triton_omni.supervisor.machine import ServerError
from triton_omni.supervisor.restart import RestartPolicy, StageRestarter
from triton_omni.supervisor.serve import Supervisor
from triton_omni_client import ConnectionFailed, Internal, Reply, Request

STARTS = 1
SHARED_MEMORY = Path("/dev/shm")
LONG = Request(text="hello", seed=CRAWLING_THINKER, thinker={"min_tokens": 250, "max_tokens": 250})
"""A reply that is still written when a process is killed."""
LOST = f"^(The Triton server, or a stage of it,|The stage [a-z0-9]+ of the Triton server) ended|^{NOT_NOW}$"
"""The gateway's words for it, which depend on when it looks."""
RESTARTS: list[tuple[list[StageName], tuple[type, str]]] = [
    (["talker"], (StageRestarter, "_open")),
    (["thinker", "talker", "token2wav"], (Supervisor, "_pause")),
]
"""Of a stage alone, and of the whole server, with what is held back."""
RESPONSES = 3
"""A random checkpoint ends one reply in some hundred with its first code, without a sound."""
SHORT = {"max_output_tokens": 20}
KILLED: list[list[StageName]] = [["unary"], ["thinker", "talker", "token2wav"]]


@dataclass
class Supervised:
    """A server whose supervisor runs on a thread, as its command's does on the main one."""

    server: Served
    before: Reply
    errors: list[ServerError] = field(default_factory=list)

    def run(self) -> None:
        try:
            self.server.supervisor.run()
        except ServerError as error:
            self.errors.append(error)

    def board(self) -> StageBoard:
        return StageBoard(ledger_name(self.server.supervisor.pid))

    def is_ready(self) -> bool:
        with suppress(OSError, HTTPException):
            return bool(urllib.request.urlopen(f"{self.url}/v2/health/ready", timeout=NEVER_S).status == 200)
        return False

    @property
    def url(self) -> str:
        return f"http://{self.server.supervisor.http_url}"

    def generate_stream(self) -> str:
        """A reply over an HTTP stream."""
        fields = {"text_input": LONG.text, "sampling_parameters": json.dumps(LONG.sampling_parameters())}
        url = f"{self.url}/v2/models/qwen2_5_omni/generate_stream"
        asked = urllib.request.Request(url, json.dumps(fields).encode())
        with urllib.request.urlopen(asked, timeout=600) as answer:
            return str(answer.read().decode())


@contextmanager
def supervised(folder: Path, checkpoint: Path, policy: RestartPolicy) -> Iterator[Supervised]:
    with serve(folder, checkpoint, TINY, restart=policy) as server:
        made = Supervised(server, ask(server))
        thread = threading.Thread(target=made.run)
        thread.start()
        yield made
        server.supervisor.request_stop()
        thread.join()


@pytest.fixture(scope="module")
def newer(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    """A server that is treated as that of a Triton whose errors wait."""
    policy = RestartPolicy(attempts=STARTS, first_wait_s=0.1, whole_server=True)
    with supervised(tmp_path_factory.mktemp("newer"), tiny_checkpoint, policy) as made:
        yield made


@pytest.fixture(scope="module")
def older(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    """A server that is treated as what it is."""
    with supervised(tmp_path_factory.mktemp("older"), tiny_checkpoint, RestartPolicy(first_wait_s=0.1)) as made:
        yield made


def test_where_errors_wait_a_death_ends_all_requests_at_once_and_the_server_comes_back(newer: Supervised) -> None:
    assert_ended_and_back(newer, ["talker"])


def test_a_server_that_does_not_stay_is_given_up_and_leaves_nothing(newer: Supervised) -> None:
    """The last test of this server: the start above counts."""
    supervisor, board = newer.server.supervisor, newer.board()
    table = ledger_name(supervisor.pid)
    os.kill(board.word(PID, "token2wav"), signal.SIGKILL)
    wait_for(lambda: bool(newer.errors), newer.server.log)
    said = f"the server does not stay (starts in 600 s: {STARTS}): token2wav: its process ended"
    assert str(newer.errors[0]).startswith(said)
    supervisor.stop()
    for name in (table, supervisor.regions):
        assert not list(SHARED_MEMORY.glob(f"{name}*"))
    board.close()


@pytest.mark.parametrize("killed", KILLED, ids="+".join)
def test_where_nobody_is_left_to_end_requests_they_end_at_once_and_the_server_comes_back(
    older: Supervised, killed: list[StageName]
) -> None:
    assert_ended_and_back(older, killed)


@pytest.mark.parametrize(("killed", "held"), RESTARTS, ids=["a stage", "the server"])
async def test_an_open_session_is_told_of_a_restart_and_its_next_response_is_whole(
    older: Supervised, killed: list[StageName], held: tuple[type, str]
) -> None:
    server, board = older.server, older.board()
    with run_gateway(server.supervisor.grpc_url) as gateway:
        async with talk(gateway.base, audio=MANUAL["audio"]) as session:
            with server.client.stream(LONG) as slow, held_back(*held):
                next(slow)  # it slows the thinker down for all
                await session.say("hello")
                await session.send("response.create")
                await session.until("response.output_audio_transcript.delta")
                for stage in killed:
                    os.kill(board.word(PID, stage), signal.SIGKILL)
                told = (await session.until("response.done")).response
                assert (told.status, told.output[0].status) == ("failed", "incomplete")
                assert re.search(LOST, told.status_details.error.message), told.status_details
                await asyncio.to_thread(wait_for, lambda: not server.client.ready(), server.log)
                away = (await session.asked("response.create", "response.done")).response
                assert (away.status, away.status_details.error.message) == ("failed", NOT_NOW)
            await asyncio.to_thread(wait_for, lambda: takes_requests(gateway), server.log, BACK_WITHIN_S)
            before = session.heard()
            for _ in range(RESPONSES):
                again = (await session.asked("response.create", "response.done", response=SHORT)).response
                assert again.status in ("completed", "incomplete"), again.status_details
            assert len(session.heard()) > len(before)
    board.close()


def takes_requests(gateway: RunningGateway) -> bool:
    """The gateway's own connection to a server may come back a moment after others'."""
    return gateway.http.get("/health/ready").status_code == 200


def assert_ended_and_back(supervised: Supervised, killed: list[StageName]) -> None:
    """Kill these under three requests; each ends before the server is ready again, whose replies are as before then."""
    server, board, old = supervised.server, supervised.board(), supervised.server.supervisor.pid
    table, deaths = ledger_name(old), server.supervisor.deaths
    with ThreadPoolExecutor(3) as pool, held_back(Supervisor, "_pause"):
        requests: list[Future[Any]] = [
            pool.submit(ask_for) for ask_for in (lambda: server.client.stream(LONG).collect(), *by_http(supervised))
        ]
        wait_for(lambda: board.open_sessions() == len(requests), board.open_sessions)
        assert board.leaves_open("unary")
        for stage in killed:
            os.kill(board.word(PID, stage), signal.SIGKILL)
        for request in requests:
            assert isinstance(request.exception(), (ConnectionFailed, Internal, OSError, HTTPException))
        assert not supervised.is_ready(), "its clients were told before it was there again"
    wait_for(lambda: supervised.is_ready() and server.client.ready(), server.log, BACK_WITHIN_S)
    assert server.supervisor.deaths - deaths in range(1, len(killed) + 1)
    assert server.supervisor.pid != old
    assert not list(SHARED_MEMORY.glob(f"{table}*"))
    again = ask(server)
    assert again.text == supervised.before.text
    np.testing.assert_allclose(again.audio, supervised.before.audio, rtol=0, atol=BATCH_TOLERANCE)
    assert supervised.errors == []
    board.close()


def ask(server: Served) -> Reply:
    """A reply that is always the same."""
    return server.client.stream(Request(text="hello", voice="Ethan", seed=7, **GREEDY)).collect()


def by_http(supervised: Supervised) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A stream and a unary request."""
    return supervised.generate_stream, lambda: supervised.server.http.unary(LONG)
