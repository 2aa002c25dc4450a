# SPDX-License-Identifier: Apache-2.0
"""A stage's process is killed while replies are written: clients hear of it, the stage comes back, nothing is lost.

Rows and codes go by rings here, past Triton, as they do on a GPU; before anything dies replies are HF's.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2_grpc

from gateway_fakes import USER, RunningGateway, assert_not_now, run_gateway
from reference.hf import HfReference
from server.asking import BATCH_TOLERANCE
from server.parity import GREEDY, SYSTEM, assert_equals_hf, check_reply, hf_reply
from server.probes import (
    BREAKING_TALKER,
    BREAKING_TOKEN2WAV,
    CRAWLING_THINKER,
    DYING_TALKER,
    DYING_TOKEN2WAV,
    SLOW_THINKER,
)
from server.serving import BACK_WITHIN_S, NEVER_S, TINY, Served, held_back, note_figures, serve, wait_for
from triton_omni.core.errors import StageName
from triton_omni.doctor import cli
from triton_omni.session.ledger_table import EPOCH, PID, STACKS_SIGNAL, STAGES
from triton_omni.session.ledger_view import StageBoard
from triton_omni.session.server_folder import ledger_name
from triton_omni.supervisor.restart import RestartPolicy, StageRestarter
from triton_omni_client import Internal, OmniClientError, Overloaded, Reply, Request
from triton_omni_client.errors import from_text
from triton_omni_client.messages import MODEL
from triton_omni_client.protocol import to_grpc

STREAMS = 16
BEFORE = "before"
DEADLINE_S = 10.0
"""Seconds in which a session reaches token2wav."""
LONG = {"thinker": {"min_tokens": 200, "max_tokens": 200}}
"""A reply that is still written when the stage is killed."""
SETTINGS = {
    "thinker": {**TINY["thinker"], "max_sessions": STREAMS},
    "talker": {**TINY["talker"], "max_sessions": STREAMS, "ring": True},
    "token2wav": {**TINY["token2wav"], "ring": True},
}
"""Rings are on, as on a GPU, so a dead stage leaves rings too."""
TOGETHER = 8
SHARED_MEMORY = Path("/dev/shm")
CONNECTIONS, ROUNDS = 24, 20
STANDS_STILL_S = 3.0
"""Triton itself waits one second."""
QUICK_RESTART = RestartPolicy(silent_after_s=1.5, overdue_after_s=6.0)


@dataclass(frozen=True)
class Crashing:
    """A server whose stages are killed, and what is known of them."""

    server: Served
    board: StageBoard
    before: Reply
    """To the request `BEFORE`, when nothing had died."""

    def ready(self) -> bool:
        """Return the answer of Triton's standard endpoint for probes."""
        url = f"http://{self.server.supervisor.http_url}/v2/health/ready"
        with contextlib.suppress(urllib.error.HTTPError):
            return bool(urllib.request.urlopen(url, timeout=NEVER_S).status == 200)
        return False


@pytest.fixture(scope="module")
def crashing(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crashing]:
    """One server for all crashes; its stop shows that none of them is in its way."""
    with serve(tmp_path_factory.mktemp("crashes"), tiny_checkpoint, SETTINGS, restart=QUICK_RESTART) as server:
        supervisor = server.supervisor
        table, regions = SHARED_MEMORY / ledger_name(supervisor.pid), supervisor.regions
        assert len(list(table.glob("*-ring"))) == 2
        board = StageBoard(table.name)
        yield Crashing(server, board, ask(server, BEFORE))
        board.close()
        server.stop_whatever_is_left()
        for name in (table.name, regions):
            assert list(SHARED_MEMORY.glob(f"{name}*")) == []


@pytest.fixture(scope="module")
def gateway(crashing: Crashing) -> Iterator[RunningGateway]:
    """In front of that server."""
    with run_gateway(crashing.server.supervisor.grpc_url) as running:
        yield running


def test_before_anything_dies_a_reply_is_hf_s_and_its_rows_and_codes_went_by_the_ring(
    crashing: Crashing, hf: HfReference
) -> None:
    server, text = crashing.server, "Tell me a story about a ship. " * 12
    expected = hf_reply(hf, hf.prepare([SYSTEM, {"role": "user", "content": text}]), "Ethan")
    assert_equals_hf(server, hf, Request(text=text, voice="Ethan", seed=7, request_id="ring", **GREEDY), expected)
    placed = [server.records.of("ring", stage, "placed") for stage in ("talker", "token2wav")]
    reply = len(expected.reply.thinker.token_ids)
    assert sum(event["rows"] for event in placed[0]) == reply - 2, (
        "but for the first row, which comes with the prompt's"
    )
    assert sum(len(event["codes"]) for event in placed[1]) == len(expected.reply.talker.codes)
    server.wait_until_idle()
    assert any('tensor="ring"' in name and size > 0 for name, size in server.link_bytes().items())


def test_many_at_once_get_what_one_gets(crashing: Crashing, hf: HfReference) -> None:
    server = crashing.server
    requests = [
        Request(text="hello " * (1 + n), voice="Chelsie", seed=n, request_id=f"ring {n}", **GREEDY)
        for n in range(TOGETHER)
    ]
    with ThreadPoolExecutor(TOGETHER) as pool:
        replies = list(pool.map(lambda request: server.client.stream(request).collect(), requests))
    for request, reply in zip(requests, replies, strict=True):
        chat = [SYSTEM, {"role": "user", "content": request.text}]
        check_reply(server, hf, request, reply, hf_reply(hf, hf.prepare(chat), "Chelsie"))


def test_before_anything_dies_the_reply_that_the_others_are_compared_with_is_hf_s(
    crashing: Crashing, hf: HfReference
) -> None:
    request = Request(text="hello", voice="Ethan", seed=7, request_id=BEFORE, **GREEDY)
    expected = hf_reply(hf, hf.prepare([SYSTEM, {"role": "user", "content": "hello"}]), "Ethan")
    check_reply(crashing.server, hf, request, crashing.before, expected)


def test_a_deadline_is_kept_though_the_stage_that_is_to_answer_stands_still(crashing: Crashing) -> None:
    server, board = crashing.server, crashing.board
    epoch = board.word(EPOCH, "token2wav")
    request = Request(text="hello", seed=CRAWLING_THINKER, request_id="overdue", timeout=DEADLINE_S, **LONG)
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(error_of, server, request)
        wait_for(lambda: in_token2wav(server) == 1, server.held)
        os.kill(board.word(PID, "token2wav"), signal.SIGSTOP)
        stopped_at = time.monotonic()
        told = error.result()
        told_s = time.monotonic() - stopped_at
    assert_names_the_dead(from_text(told), "token2wav")
    note_figures(stands_still="token2wav", told_s=told_s)
    wait_for(server.client.ready, crashing.ready, BACK_WITHIN_S)
    assert board.word(EPOCH, "token2wav") == epoch + 1
    assert_equals(server, ask(server, "after a standstill"), "after a standstill", crashing.before)


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_stage_fails_its_streams_at_once_and_comes_back(
    crashing: Crashing, gateway: RunningGateway, stage: StageName
) -> None:
    server, board = crashing.server, crashing.board
    epoch = board.word(EPOCH, stage)
    spoken = {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "wav"}, **LONG["thinker"]}
    with ThreadPoolExecutor(STREAMS) as pool, held_back(StageRestarter, "_open"):
        # The first slows the thinker down, and is among those that it serves, so that none ends before all have begun.
        streams = [pool.submit(until_the_end, server, f"{stage}, slow", CRAWLING_THINKER)]
        wait_for(lambda: in_token2wav(server) == 1, server.held)
        streams += [pool.submit(until_the_end, server, f"{stage} {seed}", seed) for seed in range(1, STREAMS - 1)]
        by_gateway = pool.submit(gateway.post, {"model": MODEL, "messages": USER, "seed": 0, **spoken})
        wait_for(lambda: board.open_sessions() == STREAMS, board.open_sessions)
        wait_for(lambda: in_token2wav(server) == STREAMS, server.held)
        killed_at = time.monotonic()
        os.kill(board.word(PID, stage), signal.SIGKILL)
        assert_told(streams, stage, killed_at)
        answer = by_gateway.result()
        assert (answer.status_code, answer.headers["retry-after"].isdecimal()) == (503, True), answer.text
        wait_for(lambda: not crashing.ready(), crashing.ready)
        assert not server.client.ready()
        assert_not_now(gateway)
        seen = cli.examine(cli.server_of_process(server.supervisor.pid), 0.0)[1]
        assert f"{stage} has died " in seen[f"{stage}/lost"]
        assert not [name for name in seen if name.partition("/")[0] in {*STAGES, "session"} - {stage}], seen
        with pytest.raises((Internal, Overloaded)):
            server.ask(f"{stage}: while it is not there", "hello")
    # Triton puts the ensemble back some moments after its last stage, and calls itself ready in between.
    wait_for(server.client.ready, crashing.ready, BACK_WITHIN_S)
    wait_for(crashing.ready, server.log)
    assert gateway.chat(seed=7).choices[0].finish_reason
    note_figures(killed=stage, back_s=time.monotonic() - killed_at)
    assert board.word(EPOCH, stage) == epoch + 1
    # The thinker closes the session of the last answer some moments after the gateway has it.
    wait_for(lambda: board.open_sessions() == 0, board.open_sessions)
    assert_equals(server, ask(server, f"after {stage}"), f"after {stage}", crashing.before)
    wait_for(lambda: omni_figures(server) == {}, lambda: omni_figures(server))
    # The ledger still has the sessions that nobody was left to close.
    assert cli.examine(cli.server_of_process(server.supervisor.pid), NEVER_S)[1] == {}


def test_a_killed_unary_model_without_requests_comes_back_alone(crashing: Crashing) -> None:
    server, board = crashing.server, crashing.board
    tritonserver, killed = server.supervisor.pid, board.word(PID, "unary")
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(ask, server, "beside the unary model's death")
        assert not board.leaves_open("unary")
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: board.word(PID, "unary") not in (0, killed), server.log, BACK_WITHIN_S)
        assert_equals(server, beside.result(), "beside the unary model's death", crashing.before)
    wait_for(crashing.ready, server.log, BACK_WITHIN_S)
    reply = server.http.unary(Request(text="hello", voice="Ethan", seed=7, **GREEDY))
    assert reply.text == crashing.before.text
    assert server.supervisor.pid == tritonserver


def test_http_is_answered_while_a_stage_is_loaded_again(crashing: Crashing) -> None:
    """On every connection: Triton has a few threads for HTTP, and each serves many."""
    server, board = crashing.server, crashing.board
    epoch = board.word(EPOCH, "talker")
    with contextlib.ExitStack() as stack, held_back(StageRestarter, "_open"):
        host, port = server.supervisor.http_url.rsplit(":", 1)
        connections = [http.client.HTTPConnection(host, int(port), timeout=NEVER_S) for _ in range(CONNECTIONS)]
        for connection in connections:
            stack.enter_context(contextlib.closing(connection))
        answered_after_s(connections)
        loads = server.log().count("loading: talker:1")
        os.kill(board.word(PID, "talker"), signal.SIGKILL)
        wait_for(lambda: server.log().count("loading: talker:1") > loads, server.log)
        note_figures(http_answered_s=max(answered_after_s(connections) for _ in range(ROUNDS)))
        assert not crashing.ready()
    wait_for(server.client.ready, server.log, BACK_WITHIN_S)
    assert board.word(EPOCH, "talker") == epoch + 1


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_stands_still_is_waited_for(crashing: Crashing, stage: StageName) -> None:
    """Though others have died before, of whose processes Triton keeps those that had open requests."""
    server, board, names = crashing.server, crashing.board, [f"{stage} stands still {number}" for number in range(2)]
    epoch = board.word(EPOCH, stage)
    with ThreadPoolExecutor(len(names)) as pool:
        os.kill(board.word(PID, stage), signal.SIGSTOP)
        streams = [pool.submit(ask, server, name) for name in names]
        time.sleep(STANDS_STILL_S)
        wait_for(lambda: not crashing.ready(), crashing.ready)
        os.kill(board.word(PID, stage), signal.SIGCONT)
    for name, stream in zip(names, streams, strict=True):
        assert_equals(server, stream.result(), name, crashing.before)
    assert board.word(EPOCH, stage) == epoch
    wait_for(crashing.ready, server.log, BACK_WITHIN_S)


def test_a_stage_that_is_asked_tells_where_its_threads_are_and_comes_back(crashing: Crashing) -> None:
    """Ask it as the supervisor asks a stage that hangs."""
    server, board = crashing.server, crashing.board
    epoch, length = board.word(EPOCH, "talker"), len(server.log())
    os.kill(board.word(PID, "talker"), STACKS_SIGNAL)
    wait_for(lambda: board.word(EPOCH, "talker") == epoch + 1 and crashing.ready(), server.log, BACK_WITHIN_S)
    assert 'session/loop.py", line' in server.log()[length:]
    assert_equals(server, ask(server, "after its stacks"), "after its stacks", crashing.before)


@pytest.mark.parametrize(("stage", "seed"), [("talker", DYING_TALKER), ("token2wav", DYING_TOKEN2WAV)])
def test_a_stage_that_dies_with_locks_of_triton_s_takes_no_server_with_it(
    crashing: Crashing, stage: StageName, seed: int
) -> None:
    server, board = crashing.server, crashing.board
    epoch = board.word(EPOCH, stage)
    with pytest.raises(Internal) as caught:
        server.ask(f"{stage} dies", "hello", seed=seed, **LONG)
    assert_names_the_dead(caught.value, stage)
    wait_for(lambda: not crashing.ready(), crashing.ready)
    wait_for(server.client.ready, server.log, BACK_WITHIN_S)
    assert board.word(EPOCH, stage) == epoch + 1
    assert_equals(server, ask(server, f"after the locks of {stage}"), f"after the locks of {stage}", crashing.before)


def test_a_stage_whose_engine_failed_ends_its_streams_and_comes_back(crashing: Crashing) -> None:
    server, board = crashing.server, crashing.board
    old, epoch = board.word(PID, "token2wav"), board.word(EPOCH, "token2wav")
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(server.ask, "beside a failing engine", "hello", seed=SLOW_THINKER, **LONG)
        wait_for(lambda: board.open_sessions() == 1, board.open_sessions)
        for failing in (lambda: server.ask("failing engine", "hello", seed=BREAKING_TOKEN2WAV), beside.result):
            with pytest.raises(Internal, match="the engine of token2wav failed: RuntimeError") as caught:
                failing()
            assert caught.value.stage == "token2wav"
    wait_for(lambda: not crashing.ready(), crashing.ready)
    wait_for(server.client.ready, crashing.ready, BACK_WITHIN_S)
    assert board.word(EPOCH, "token2wav") == epoch + 1
    assert board.word(PID, "token2wav") != old
    assert_equals(server, ask(server, "after a failed engine"), "after a failed engine", crashing.before)


def test_a_server_stops_while_a_stage_is_started_again(crashing: Crashing, gateway: RunningGateway) -> None:
    """The last test of this module."""
    server = crashing.server
    loads = server.log().count("loading: talker:1")
    running = server.client.stream(Request(text="hello", seed=SLOW_THINKER, request_id="open"))
    next(running)
    for failing in (lambda: server.ask("breaking", "hello", seed=BREAKING_TALKER), running.collect):
        with pytest.raises(Internal) as caught:
            failing()
        assert caught.value.stage == "talker"
        assert "the engine of talker failed: RuntimeError" in caught.value.message
        assert "the device is lost" not in caught.value.message, "the cause is for the log, not for clients"
    wait_for(lambda: not server.client.ready(), server.log)
    wait_for(lambda: server.log().count("loading: talker:1") == loads + 1, server.log)
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(server.stop_whatever_is_left)
        while not stopping.done():
            assert_not_now(gateway)
        seconds = stopping.result()
    assert_not_now(gateway)
    note_figures(after="crashes", stop_s=seconds)


def ask(server: Served, request_id: str) -> Reply:
    """A reply that is always the same."""
    return server.ask(request_id, "hello", voice="Ethan", seed=7, **GREEDY)


def assert_equals(server: Served, reply: Reply, request_id: str, expected: Reply) -> None:
    """The same tokens, codes and sound as the reply to `BEFORE`."""
    assert server.records.tokens(request_id) == server.records.tokens(BEFORE)
    assert server.records.codes(request_id) == server.records.codes(BEFORE)
    assert reply.text == expected.text
    assert len(reply.audio) > 0
    np.testing.assert_allclose(reply.audio, expected.audio, rtol=0, atol=BATCH_TOLERANCE)


def error_of(server: Served, request: Request) -> str:
    """Return the error that ends a stream; this project's client would itself wait only until the deadline."""
    message = to_grpc(request, MODEL)
    with grpc.insecure_channel(server.supervisor.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = stub.ModelStreamInfer(iter([message]), timeout=BACK_WITHIN_S)
        return next(str(answer.error_message) for answer in answers if answer.error_message)


def until_the_end(server: Served, request_id: str, seed: int) -> float:
    """The moment at which a stream ended that got a whole reply; raises its error with that moment as its cause."""
    try:
        server.ask(request_id, "hello", seed=seed, **LONG)
    except Internal as error:
        raise error from Ended(time.monotonic())
    return time.monotonic()


class Ended(Exception):
    """The end of a stream, with its time."""

    def __init__(self, at: float) -> None:
        super().__init__(at)
        self.at = at


def in_token2wav(server: Served) -> float:
    """Sessions that are open there."""
    return server.metrics('omni_sessions{stage="token2wav"}').popitem()[1]


def assert_told(streams: list[Future[float]], stage: StageName, killed_at: float) -> None:
    """Every stream fails, and its error names the stage."""
    told = []
    for stream in streams:
        error = stream.exception(timeout=NEVER_S)
        assert isinstance(error, Internal)
        assert_names_the_dead(error, stage)
        assert isinstance(error.__cause__, Ended)
        told.append(error.__cause__.at - killed_at)
    note_figures(killed=stage, told_s=[min(told), max(told)])


def assert_names_the_dead(error: OmniClientError, stage: StageName) -> None:
    """Ours, which says when to come back; or Triton's, of a message that it was handing over at that moment."""
    assert error.stage == stage
    ours = f"the process of {stage} ended unexpectedly" in error.message and error.retry_after_ms
    assert ours or "is not healthy" in error.message


def answered_after_s(connections: list[http.client.HTTPConnection]) -> float:
    """Return the seconds until all of them, asked at one time, have their answers."""
    asked_at = time.monotonic()
    for connection in connections:
        connection.request("GET", "/v2/health/live")
    for connection in connections:
        connection.getresponse().read()
    return time.monotonic() - asked_at


def omni_figures(server: Served) -> dict[str, float]:
    """Return the figures of what the stages hold, without a dead stage's requests, which Triton keeps for ever."""
    return {name: value for name, value in server.held().items() if name.startswith("omni_")}
