# SPDX-License-Identifier: Apache-2.0
"""Each way to go away at each moment of a reply: the session is free and every engine is rid of it before its end.

A closed connection of a unary HTTP request is the one way that is missing: Triton tells nobody of it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from gateway_fakes import RunningGateway
from realtime_client import MANUAL, talk
from server.probes import (
    CRAWLING_THINKER,
    SLOW_PREPROCESSING,
    SLOW_TALKER,
    SLOW_TOKEN2WAV,
)
from server.serving import TINY, Served, note_figures, wait_for
from server.test_cancel import LONG, LONG_PROMPT, SHORT, WAYS, check_dropped
from triton_omni.session.ledger_table import STAGES
from triton_omni.session.ledger_view import StageBoard
from triton_omni.session.server_folder import ledger_name
from triton_omni_client import Request

PLACES: int = TINY["thinker"]["engine"]["max_num_seqs"]
SESSIONS: int = TINY["thinker"]["max_sessions"]

Way = Callable[[Served, Request], Any]


@dataclass(frozen=True)
class Sessions:
    """The sessions that began since some moment, and what has become of them."""

    server: Served
    board: StageBoard
    since_ns: int
    earlier: frozenset[str]

    @classmethod
    def from_now(cls, server: Served, board: StageBoard) -> Sessions:
        events = (event for stage in STAGES for event in server.records.events(stage))
        return cls(server, board, time.monotonic_ns(), frozenset(event["key"] for event in events))

    def events(self, stage: str, event: str) -> list[dict[str, Any]]:
        found = self.server.records.events(stage)
        return [one for one in found if one["event"] == event and one["ns"] > self.since_ns]

    def keys(self, stage: str, event: str) -> set[str]:
        """Without those of sessions before it, of which a later stage may still be told."""
        return {found["key"] for found in self.events(stage, event)} - self.earlier


def prepared(sessions: Sessions) -> set[str]:
    """Return the sessions that are being prepared, or wait for that: no engine knows them."""
    return sessions.keys("talker", "message") if sessions.events("thinker", "preparing") else set()


def added(sessions: Sessions) -> set[str]:
    return sessions.keys("thinker", "added")


def generating(sessions: Sessions) -> set[str]:
    sent = [*sessions.events("token2wav", "message"), *sessions.events("token2wav", "placed")]
    return {found["key"] for found in sent if found["codes"]} - sessions.earlier


def after_thinkers_end(sessions: Sessions) -> set[str]:
    return sessions.keys("thinker", "finished")


@dataclass(frozen=True)
class Moment:
    """A moment at which clients go away."""

    seed: int
    reached: Callable[[Sessions], set[str]]
    """Keys of sessions that are there."""
    options: dict[str, Any]
    text: str = "hello"
    crowd: int = 0
    """Number of other sessions beside it."""
    deadline_s: float = 1.0
    """Deadline in seconds, which its reply exceeds."""
    silent: bool = False
    """True if nothing is written to the client, since the thinker has made nothing that the other engines could have.
    Only by a write does Triton see that an HTTP connection is closed."""


MOMENTS = {
    "while media are decoded": Moment(SLOW_PREPROCESSING, prepared, LONG, deadline_s=0.3, silent=True),
    "while it waits for a place": Moment(1, added, LONG, crowd=PLACES, silent=True),
    "in prefill": Moment(CRAWLING_THINKER, added, LONG, LONG_PROMPT, silent=True),
    "while generating": Moment(CRAWLING_THINKER, generating, LONG),
    "after the thinker's end, in the talker": Moment(SLOW_TALKER, after_thinkers_end, SHORT),
    "after the thinker's end, in token2wav": Moment(SLOW_TOKEN2WAV, after_thinkers_end, SHORT),
}


@contextmanager
def gateway_left(server: Served, request: Request, *, gateway: RunningGateway) -> Iterator[Callable[[], None]]:
    """A caller of the gateway who closes the connection, whatever has come."""
    said = {"role": "user", "content": request.text}
    thinker, talker = dict(request.thinker), dict(request.talker)
    body = {
        "model": "qwen2_5_omni",
        "messages": [said],
        "stream": True,
        "seed": request.seed,
        "modalities": ["text", "audio"],
        "audio": {"voice": "Ethan", "format": "pcm16"},
        "max_completion_tokens": thinker["max_tokens"],
        "min_tokens": thinker.get("min_tokens", 0),
        "talker": talker,
    }
    host, _, port = gateway.base.removeprefix("http://").rpartition(":")
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + content)
        yield connection.close


@pytest.fixture
def ways(gateway: RunningGateway) -> dict[str, Way]:
    return {**WAYS, "gateway left": functools.partial(gateway_left, gateway=gateway)}


@pytest.mark.parametrize("name", MOMENTS)
def test_whoever_goes_away_leaves_nothing_behind(server: Served, ways: dict[str, Way], name: str) -> None:
    moment = MOMENTS[name]
    chosen = [way for way in ways.items() if not (moment.silent and way[0] == "HTTP stream closed")]
    # With the crowd there is room for few at once.
    for group in batches(chosen, SESSIONS - moment.crowd):
        leave(server, moment, dict(group))


@contextmanager
def sessions_beside(server: Served, crowd: int) -> Iterator[StageBoard]:
    """The board of the sessions while so many others generate, and no more."""
    board = StageBoard(ledger_name(server.supervisor.pid))
    with ExitStack() as stack:
        stack.callback(board.close)
        wait_for(lambda: board.open_sessions() == 0, board.open_sessions)
        others = Sessions.from_now(server, board)
        for _ in range(crowd):
            stack.enter_context(server.client.stream(Request(text="hello", seed=CRAWLING_THINKER, **LONG)))
        wait_for(
            lambda: len(others.keys("thinker", "tokens")) == crowd,
            lambda: (board.open_sessions(), others.keys("thinker", "added"), others.keys("thinker", "tokens")),
        )
        yield board


def test_a_realtime_session_that_is_lost_ends_its_response_in_every_stage(
    server: Served, gateway: RunningGateway
) -> None:
    async def drop_while_it_speaks() -> int:
        async with talk(gateway.base, **MANUAL) as session:
            await session.say("hello")
            await session.send("response.create")
            await session.until("response.output_audio.delta")
            left_ns = time.monotonic_ns()
            session.connection._connection.transport.abort()
        return left_ns

    with sessions_beside(server, 0) as board:
        for _ in range(5):
            sessions = Sessions.from_now(server, board)
            left_ns = asyncio.run(drop_while_it_speaks())
            wait_for(lambda: board.open_sessions() == 0, board.open_sessions)
            free_ns = time.monotonic_ns()
            # A short reply may end before the loss is noticed.
            if any(sessions.events(stage, "noticed") for stage in STAGES):
                break
    (key,) = generating(sessions)
    noticed_ns = first_of(sessions, "noticed", key)
    assert noticed_ns > left_ns
    check_dropped(server, key, noticed_ns)
    note_figures(
        moment="realtime session lost", noticed_ms=(noticed_ns - left_ns) / 1e6, free_ms=(free_ns - left_ns) / 1e6
    )


def batches(items: Sequence[tuple[str, Way]], size: int) -> Iterator[Sequence[tuple[str, Way]]]:
    return (items[at : at + size] for at in range(0, len(items), size))


def leave(server: Served, moment: Moment, ways: dict[str, Way]) -> None:
    """Ask each way, go away at the moment, and see that all is free."""
    with sessions_beside(server, moment.crowd) as board, ExitStack() as stack:
        sessions, leaving = Sessions.from_now(server, board), []
        for way, ask in ways.items():
            request = Request(
                text=moment.text, seed=moment.seed, request_id=f"{way} {time.monotonic()}", **moment.options
            )
            leaving.append(stack.enter_context(ask(server, request)))
        wait_for(lambda: board.open_sessions() == moment.crowd + len(ways), board.open_sessions)
        wait_for(lambda: len(moment.reached(sessions)) >= len(ways), lambda: moment.reached(sessions))
        left_ns = time.monotonic_ns()
        for go in leaving:
            go()
        wait_for(lambda: board.open_sessions() == moment.crowd, board.open_sessions)
        free_ns = time.monotonic_ns()
        keys = moment.reached(sessions)
    noticed = {key: first_of(sessions, "noticed", key) for key in keys}
    noticed_ns = max(noticed.values())
    assert min(noticed.values()) > left_ns
    for key in keys:
        check_dropped(server, key, noticed[key], ("thinker",) if moment.silent else STAGES)
    record(moment, left_ns, noticed_ns, free_ns)


def first_of(sessions: Sessions, event: str, key: str) -> int:
    """Return when any stage first recorded the event of a session, in nanoseconds of the machine's monotonic clock."""
    return min(found["ns"] for stage in STAGES for found in sessions.events(stage, event) if found["key"] == key)


def record(moment: Moment, left_ns: int, noticed_ns: int, free_ns: int) -> None:
    name = next(name for name, found in MOMENTS.items() if found is moment)
    note_figures(moment=name, noticed_ms=(noticed_ns - left_ns) / 1e6, free_ms=(free_ns - left_ns) / 1e6)


@pytest.mark.parametrize("name", MOMENTS)
def test_a_deadline_ends_a_request_at_each_moment(server: Served, name: str) -> None:
    moment = MOMENTS[name]
    sampling = {"seed": moment.seed, "timeout": moment.deadline_s, **moment.options}
    body = json.dumps({"text_input": moment.text, "sampling_parameters": json.dumps(sampling)})
    outlast(server, moment, body)


def outlast(server: Served, moment: Moment, body: str) -> None:
    """Ask with a deadline that passes, and see that the answer says so before the reply's end."""
    with sessions_beside(server, moment.crowd) as board:
        begin_ns = time.monotonic_ns()
        status, text = server.post("/v2/models/qwen2_5_omni_unary/generate", body)
        seconds = (time.monotonic_ns() - begin_ns) / 1e9
        assert status == 400
        assert f"timeout: {moment.deadline_s:g} s have passed [omni:timeout;stage=thinker]" in text
        assert moment.deadline_s <= seconds
        wait_for(lambda: board.open_sessions() == moment.crowd, board.open_sessions)
