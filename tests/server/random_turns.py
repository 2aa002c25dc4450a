# SPDX-License-Identifier: Apache-2.0
"""Random conversations with one server at once: turns, barge-ins and kills of stages.

Each whole reply is compared with the reply to the same request without a cache.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, TypeVar

from media_samples import audio_file, image_file, video_file
from server.conversations import AT_ONCE, IDLE_AFTER_KILLS_S, assert_same, kill, leave_few_blocks
from server.serving import REPLY_S, Served
from triton_omni.core.errors import StageName
from triton_omni_client import (
    NO_RETRY,
    Conversation,
    Internal,
    Media,
    OmniClient,
    Overloaded,
    Reply,
    Request,
    Timeout,
    TooLarge,
)

T = TypeVar("T")
CLIENTS, CALLERS = AT_ONCE, 4
"""Salts: some clients share one, and with it what their conversations begin with."""
LOST = "lost to a kill"
PAUSE_S = 0.25
"""Until a refused request is asked again: the talker may have no room for its rows, or a stage may be gone."""
TIMEOUT_S = REPLY_S + 15.0
"""Above the server's own deadline."""
CANCELLED, WITH_MEDIA = 0.3, 0.15
"""Shares of turns."""
SAID = ("next?", "why?", "and what is this then?", "go on, and say more of it. " * 3)
OPENINGS = ("Tell me about the sea. " * 4, "Count the ships that you see. " * 3, "What may this be? " * 6)
MEDIA = (
    Media("image", image_file("png", 112, 84)),
    Media("audio", audio_file("wav", seconds=1.1)),
    Media("video", video_file("mp4", seconds=0.3)),
)
KILLED: tuple[StageName, ...] = ("talker", "thinker")


@dataclass(frozen=True)
class Answered:
    """A whole reply, and the id of its request."""

    request_id: str
    reply: Reply


@dataclass(frozen=True)
class Compared:
    """A whole reply, and that to the same request without the cache."""

    plain: Answered
    salted: Answered
    speaks: bool


@dataclass
class RandomTurns:
    """One run: `CLIENTS` threads take `turns` turns together, while stages are killed."""

    server: Served
    turns: int
    seed: int
    kills: int
    compared: list[Compared] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    """Outcome of each turn."""
    lost: list[str] = field(default_factory=list)
    """Requests that a kill ended, by error. One that the thinker had not passed on has its client's timeout alone."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _attempts: Iterator[int] = field(default_factory=itertools.count)
    _begun: int = 0
    _over: int = 0
    """Kills that have begun, and those after which the server is ready again."""
    _ready: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Take all turns; a request may fail only where its stage was killed."""
        self._ready.set()
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self._converse, number) for number in range(CLIENTS)]
            for number in range(self.kills):
                due = self.turns * (number + 1) // (self.kills + 2)
                while len(self.ended) < due and not all(client.done() for client in clients):
                    time.sleep(0.02)
                self._kill(KILLED[number % len(KILLED)])
            for client in clients:
                client.result()

    def _kill(self, stage: StageName) -> None:
        self._ready.clear()
        self._begun += 1
        try:
            kill(self.server, stage)
        finally:  # clients wait for it
            self._over += 1
            self._ready.set()

    def _converse(self, number: int) -> None:
        chance, talk = Random(f"{self.seed} {number}"), None
        with OmniClient(self.server.supervisor.grpc_url, timeout=TIMEOUT_S, retry=NO_RETRY) as client:
            while (turn := next(self._numbers)) < self.turns:
                ended = None
                while ended is None:
                    opens, talk = talk is None, talk or _conversation(chance)
                    try:
                        ended = self._turn(client, chance, talk, f"random {self.seed} {turn}", opens=opens)
                    except TooLarge:
                        talk = None
                self.ended.append(ended)

    def _turn(self, client: OmniClient, chance: Random, talk: Conversation, name: str, *, opens: bool) -> str:
        """Take the next turn of a conversation; how it ended."""
        said = _said(chance, opens=opens)
        options, leaves_after = _options(chance), chance.randrange(6)
        if chance.random() < CANCELLED:
            return self._answered(lambda _: _barge_in(talk.ask(client, *said, **options), leaves_after)) or LOST
        request = talk.request(*said, **options)
        salted = self._whole(client, replace(request, request_id=name))
        if salted is None:
            return LOST
        talk.add(*said, salted.reply.text)
        without_cache = replace(request, request_id=f"{name}, plain", cache_salt=None)
        while (plain := self._whole(client, without_cache)) is None:
            pass
        self.compared.append(Compared(plain, salted, request.modalities is None))
        return "compared"

    def _whole(self, client: OmniClient, request: Request) -> Answered | None:
        def ask(attempt: int) -> Answered:
            named = replace(request, request_id=f"{request.request_id}, {attempt}")
            return Answered(named.request_id, client.stream(named).collect())

        return self._answered(ask)

    def _answered(self, ask: Callable[[int], T]) -> T | None:
        """Return its result, given the number of the attempt; None if a stage was killed meanwhile."""
        self._ready.wait()
        over = self._over
        while True:
            try:
                return ask(next(self._attempts))
            except Overloaded:
                time.sleep(PAUSE_S)
            except (Internal, Timeout) as error:
                if self._begun == over:
                    raise
                self.lost.append(f"requests lost to a kill: {type(error).__name__}")
                return None


def _conversation(chance: Random) -> Conversation:
    voice, salt = chance.choice(("Chelsie", "Ethan")), f"caller {chance.randrange(CALLERS)}"
    return Conversation(system="Be brief.", voice=voice, cache_salt=salt)


def _said(chance: Random, *, opens: bool) -> tuple[str, tuple[Media, ...]]:
    text = chance.choice(OPENINGS if opens else SAID)
    return text, (chance.choice(MEDIA),) if chance.random() < WITH_MEDIA else ()


def _options(chance: Random) -> dict[str, Any]:
    """Long texts fill the thinker's cache, long speech the talker's; what token2wav makes of it matters least."""
    kind = chance.choices(("short", "written", "spoken at length"), (0.2, 0.4, 0.4))[0]
    tokens, codes = {"short": (8, 10), "written": (80, 0), "spoken at length": (8, 120)}[kind]
    options: dict[str, Any] = {"seed": 5, "thinker": {"temperature": 0, "max_tokens": tokens, "min_tokens": tokens}}
    if not codes:
        return {**options, "modalities": ["text"]}
    talker = {"temperature": 0, "max_tokens": codes, "min_tokens": codes}
    return {**options, "talker": talker, "token2wav": {"solver": "euler", "num_steps": 2}}


def _barge_in(turn: Any, deltas: int) -> str:
    """Close a reply after so many deltas; the conversation goes on with what was heard. Returns how it ended."""
    for _ in itertools.islice(turn, deltas):
        pass
    turn.close()
    return "cancelled" if turn.reply().info is None else "over before its cancel"


def random_turns(server: Served, turns: int, seed: int, kills: int) -> Counter[str]:
    """Take so many turns in random conversations at once, and see that none was changed by a cache.

    A stage that was killed has a cache of few blocks from then on.

    Returns:
        How often what happened.
    """
    before = _happened(server)
    leave_few_blocks(server)
    run = RandomTurns(server, turns, seed, kills)
    run.run()
    server.wait_until_idle(IDLE_AFTER_KILLS_S)
    counts = Counter(run.ended + run.lost) + _happened(server) - before
    for found in run.compared:
        _compare(server, found, counts)
    return counts


def _compare(server: Served, found: Compared, counts: Counter[str]) -> None:
    plain, salted = found.plain, found.salted
    assert salted.reply.text == plain.reply.text
    assert server.records.tokens(salted.request_id) == server.records.tokens(plain.request_id)
    assert salted.reply.info is not None
    counts["thinker hits"] += salted.reply.info.prompt_tokens_details["cached_tokens"] > 0
    replies = (plain.reply, salted.reply)
    if found.speaks:
        counts["talker hits"] += assert_same(server, plain.request_id, salted.request_id, replies) > 0


def _happened(server: Served) -> Counter[str]:
    return Counter(
        f"{stage} {event['event']}"
        for stage in KILLED
        for event in server.records.events(stage)
        if event["event"] in ("preempted", "evicted")
    )
