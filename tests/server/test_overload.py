# SPDX-License-Identifier: Apache-2.0
"""A full server, and more requests: a session with a place keeps it, others are refused at once."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from tritonclient.grpc import service_pb2_grpc

from processes import family
from server.asking import BATCH_TOLERANCE, every_session_taken
from server.serving import REPLY_S, TINY, Served, note_figures, resident_bytes, wait_for
from triton_omni.core.device import gpu_count
from triton_omni.core.errors import StageName
from triton_omni.session.ledger_table import STAGES
from triton_omni.session.ledger_view import StageBoard
from triton_omni.session.server_folder import ledger_name
from triton_omni_client import BadRequest, OmniClient, Overloaded, Reply, Request, Retry, TooLarge
from triton_omni_client.messages import MODEL
from triton_omni_client.protocol import StreamReader, to_grpc
from triton_omni_client.reply import ReplyBuilder

SESSIONS: int = TINY["thinker"]["max_sessions"]
SHORT = {"modalities": ["text"], "thinker": {"max_tokens": 2}}
FEW_STEPS = {"solver": "euler", "num_steps": 4}
"""Options of token2wav with a ninth of the shipped work, for tests in which the sound does not matter."""
CODES = 150
SLOW_READERS = 64 if gpu_count() else 12
"""A GPU's stages hand rows and codes over in a pool of device memory, which unread replies must not use up."""
LONG_PROMPT = "hello " * 80
"""480 tokens, in several steps."""
REPLY_BYTES = CODES * 480 * 24
"""Bytes of a reply in JSON, where a sample has up to 24 characters instead of the 4 bytes of FP32."""
MARGIN_BYTES = 32 << 20
REFUSED, REFUSED_BYTES = 160, 2 << 20
NO_MORE_WORK, IDLE_WORK_S = 3.0, 2.0
"""Largest factor of processor time for a reply beside others that nobody reads, and seconds for an
idle server besides."""

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


def test_one_request_too_many_is_refused_at_once_with_a_time_to_come_back(server: Served) -> None:
    with every_session_taken(server):
        for ask in (streamed, unary):
            with pytest.raises(Overloaded, match=f"all {SESSIONS} sessions are in use") as refusal:
                ask(server, Request(text="hello"))
            assert refusal.value.retry_after_ms
        assert sessions_of(server) == SESSIONS, "both were refused while all others were served"


@contextmanager
def unread(server: Served, request: Request, *, over_http: bool) -> Iterator[Callable[[], bytes | list[Any]]]:
    """A request whose client reads nothing, until it is told to read all."""
    if over_http:
        with http_unread(server, request) as read:
            yield read
        return
    options = [("grpc.http2.bdp_probe", 0), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(server.supervisor.grpc_url, options=options) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([to_grpc(request, MODEL)]))
        yield lambda: list(call)


@contextmanager
def http_unread(server: Served, request: Request) -> Iterator[Callable[[], bytes]]:
    host, _, port = server.supervisor.http_url.rpartition(":")
    fields = {"text_input": request.text, "sampling_parameters": json.dumps(request.sampling_parameters())}
    body = json.dumps(fields).encode()
    head = f"POST /v2/models/{MODEL}/generate_stream HTTP/1.0\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(head.encode() + body)
        yield lambda: b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_slow_readers_cost_only_themselves(server: Served) -> None:
    """They hold no session, no row and no place once the reply is made, and change nobody's reply."""
    spoken = {
        "thinker": {"max_tokens": 20},
        "talker": {"temperature": 0, "min_tokens": CODES, "max_tokens": CODES},
        "token2wav": FEW_STEPS,
    }
    slow, quick = Request(text=LONG_PROMPT, seed=3, **spoken), Request(text="why", seed=4, **spoken)
    whole, expected = server.client.stream(slow).collect(), server.client.stream(quick).collect()
    alone_s = work_of(server, quick)
    server.wait_until_idle()
    before = resident_bytes(server.supervisor.pid)
    with ExitStack() as stack:
        # More than there are sessions, in waves: who was refused would show, since nothing could be read.
        unread_replies = []
        for number in range(SLOW_READERS):
            wait_for(lambda: sessions_of(server) < SESSIONS - 1, lambda: "slow readers hold their sessions")
            begun = prompts_begun(server)
            unread_replies.append(stack.enter_context(unread(server, slow, over_http=number % 4 == 0)))
            wait_for(lambda begun=begun: prompts_begun(server) > begun, lambda: "a slow reader's prompt never began")
        reply = server.client.stream(quick).collect()
        assert_same(reply, expected)
        wait_for(lambda: sessions_of(server) == 0, lambda: "slow readers hold their sessions")
        grown = resident_bytes(server.supervisor.pid) - before
        assert grown < SLOW_READERS * REPLY_BYTES + MARGIN_BYTES
        # With nobody's reply read yet, the next one takes no more work than before.
        beside_s = work_of(server, quick)
        note_figures(unread=SLOW_READERS, work_alone_s=alone_s, work_beside_s=beside_s)
        assert beside_s < NO_MORE_WORK * alone_s + IDLE_WORK_S
        for number, read in enumerate(unread_replies):
            assert_whole(read(), whole, over_http=number % 4 == 0)


def test_refused_requests_leave_none_of_their_bytes(server: Served) -> None:
    """Triton 24.10 keeps a request for ever whose stream is cancelled between its error and its end."""

    def refuse(number: int) -> None:
        # By the client's own stream, and by that of the unary model.
        (streamed, unary)[number % 2](server, Request(text="x " * (REFUSED_BYTES // 2)))

    def refuse_all(count: int) -> None:
        with ThreadPoolExecutor(4) as pool:
            for ended in [pool.submit(refuse, number) for number in range(count)]:
                with pytest.raises(TooLarge, match="text_input"):
                    ended.result()

    refuse_all(24)  # fills the buffers that are used again
    before = resident_bytes(server.supervisor.pid)
    refuse_all(REFUSED)
    assert resident_bytes(server.supervisor.pid) - before < REFUSED * REFUSED_BYTES / 4


def assert_whole(found: bytes | list[Any], expected: Reply, *, over_http: bool) -> None:
    if over_http:
        assert isinstance(found, bytes)
        events = [json.loads(line[6:]) for line in found.splitlines() if line.startswith(b"data: ")]
        text = "".join(event["text_output"] for event in events)
        samples = sum(len(event["audio_output"]) for event in events)
        assert events[-1]["info"]
    else:
        builder, reader = ReplyBuilder(), StreamReader(Request(text="hello"))
        for response in found:
            for delta in reader.feed(response):
                builder.add(delta)
        text, samples = builder.reply().text, len(builder.reply().audio)
        assert reader.final
    assert (text, samples) == (expected.text, len(expected.audio))


def work_of(server: Served, request: Request) -> float:
    """Seconds of the processors that the server takes for a reply, however long that lasts."""
    begin = processor_s(server)
    server.client.stream(request).collect()
    return processor_s(server) - begin


def processor_s(server: Served) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in family(server.supervisor.pid)]
    return sum(spent.user + spent.system for spent in times)


def sessions_of(server: Served) -> int:
    board = StageBoard(ledger_name(server.supervisor.pid))
    try:
        return board.open_sessions()
    finally:
        board.close()


def prompts_begun(server: Served) -> int:
    return sum(event["event"] == "added" for event in server.records.events("thinker"))


def assert_same(reply: Reply, expected: Reply) -> None:
    assert reply.text == expected.text
    np.testing.assert_allclose(reply.audio, expected.audio, rtol=0, atol=BATCH_TOLERANCE)


@contextmanager
def slowed(pid: int) -> Iterator[None]:
    """A process that runs a fifth of the time."""
    over = threading.Event()

    def alternate() -> None:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.08)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.02)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("stage", STAGES)
def test_a_slow_stage_slows_the_others_down_and_loses_nothing(server: Served, stage: StageName) -> None:
    """Long prompts and replies for as many as the server takes, and more that come when there is room."""
    asked = {
        f"beside a slow {stage} {number}": Request(
            text="Tell me about the sea. " * (30 if number % 2 else 1),
            seed=number % 4,
            request_id=f"beside a slow {stage} {number}",
            thinker={"min_tokens": 10, "max_tokens": 10},
            talker={"temperature": 0, "min_tokens": 24, "max_tokens": 24},
            token2wav=FEW_STEPS,
        )
        for number in range(SESSIONS + 2)
    }
    alone = {
        name: server.client.stream(replace(request, request_id="")).collect()
        for name, request in list(asked.items())[:2]
    }
    patience = Retry(attempts=40)
    with (
        slowed(server.pid(stage)),
        OmniClient(server.supervisor.grpc_url, timeout=REPLY_S, retry=patience) as patient,
        ThreadPoolExecutor(len(asked)) as pool,
    ):
        found = pool.map(lambda request: patient.stream(request).collect(), asked.values())
        replies = dict(zip(asked, found, strict=True))
    for name, expected in alone.items():
        assert_same(replies[name], expected)
    assert all(len(reply.audio) == 24 * 480 for reply in replies.values())
