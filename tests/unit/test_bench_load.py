# SPDX-License-Identifier: Apache-2.0
"""The load generator: how many requests are open, when they start, what becomes of errors and of Ctrl-C."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from triton_omni_client.bench.load import LoadRun, LoopLag, run_until
from triton_omni_client.bench.records import INTERRUPTED, RequestRecord
from triton_omni_client.errors import Internal, OmniClientError, Overloaded
from triton_omni_client.messages import AudioDelta, Delta, Request, TextDelta

Reply = Callable[[int], AsyncIterator[Delta]]


async def speak(_number: int) -> AsyncIterator[Delta]:
    await asyncio.sleep(0.01)
    yield TextDelta("Hi")
    await asyncio.sleep(0.01)
    yield AudioDelta(np.zeros(240, np.float32))


@dataclass
class FakeClient:
    """Answers request number `i` with `reply(i)`; notes how many were open at once."""

    reply: Reply = speak
    open: int = 0
    most_open: int = 0
    left_early: list[int] = field(default_factory=list)

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[AsyncIterator[Delta]]:
        number = int(request.request_id)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            yield self.reply(number)
        except asyncio.CancelledError:
            self.left_early.append(number)
            raise
        finally:
            self.open -= 1


class Clock:
    """Seconds that pass only while the one task that waits does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self._thread, self._sleep = threading.get_ident(), asyncio.sleep
        monkeypatch.setattr(asyncio, "sleep", self._pass)

    def __call__(self) -> float:
        return self.now_s

    async def _pass(self, seconds: float) -> None:
        if threading.get_ident() != self._thread:  # a server of other tests
            await self._sleep(seconds)
            return
        self.now_s += max(0.0, seconds)
        await self._sleep(0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@dataclass
class Counts:
    sent: int = 0
    ends: list[RequestRecord] = field(default_factory=list)

    def started(self) -> None:
        self.sent += 1

    def ended(self, record: RequestRecord) -> None:
        self.ends.append(record)


def request(number: int) -> Request:
    return Request(text="hi", request_id=str(number))


async def test_a_closed_loop_keeps_its_places_filled_and_marks_the_warm_up() -> None:
    client, counts = FakeClient(), Counts()
    run = LoadRun(client, request, counts)
    await run.closed_loop(3, requests=7, warm_up=2)
    assert client.most_open == 3
    assert sorted(record.index for record in run.records) == list(range(9))
    assert {record.index for record in run.records if record.warm_up} == {0, 1}
    assert all(record.ok and record.chunks and record.text_at_s for record in run.records)
    assert (counts.sent, counts.ends) == (9, run.records)


async def test_the_places_of_a_closed_loop_begin_over_the_ramp_up() -> None:
    gone = asyncio.Event()

    async def reply(number: int) -> AsyncIterator[Delta]:
        if number == 2:
            gone.set()
        await gone.wait()
        yield TextDelta("Hi")

    run = LoadRun(FakeClient(reply), request, Counts())
    await run.closed_loop(3, requests=3, warm_up=0, ramp_up_s=0.3)
    begun = sorted(record.start_s for record in run.records)
    assert all(start >= due for start, due in zip(begun, (0.0, 0.1, 0.2), strict=True))


async def test_a_crowd_asks_at_once_and_the_next_when_all_were_answered() -> None:
    open_now: set[int] = set()
    seen: list[set[int]] = []

    async def reply(number: int) -> AsyncIterator[Delta]:
        open_now.add(number)
        await asyncio.sleep(0.02)
        seen.append(set(open_now))
        if number == 4:
            await asyncio.sleep(0.1)
        open_now.discard(number)
        if number == 5:
            raise Internal("broken")
        yield TextDelta("Hi")

    run = LoadRun(FakeClient(reply), request, Counts())
    await run.crowds(3, requests=5, warm_up=3)
    crowds = [{0, 1, 2}, {3, 4, 5}, {6, 7}]
    assert {frozenset(found) for found in seen} >= {frozenset(crowd) for crowd in crowds}
    assert all(any(found <= crowd for crowd in crowds) for found in seen), "none meets another crowd"
    records = sorted(run.records, key=lambda record: record.index)
    assert [record.warm_up for record in records] == [True] * 3 + [False] * 5
    starts = [record.start_s for record in records]
    assert len({*starts[:3]}) == len({*starts[3:6]}) == len({*starts[6:]}) == 1
    assert starts[6] >= max(record.end_s for record in records[3:6])


async def test_who_listens_asks_again_once_a_reply_was_heard(clock: Clock) -> None:
    async def reply(number: int) -> AsyncIterator[Delta]:
        if number == 1:
            raise Internal("broken")
        for _ in range(2):
            yield AudioDelta(np.zeros(240_000 if number == 2 else 12_000, np.float32))

    run = LoadRun(FakeClient(reply), request, Counts(), clock=clock)
    await run.closed_loop(1, requests=3, warm_up=0, listens=True)
    # Two chunks of 0.5 s, which came at once; of a failure there is nothing to hear.
    assert [(record.start_s, record.end_s) for record in run.records] == [(0, 0), (1, 0), (1, 0)]
    assert clock.now_s == 1, "nobody waits for the last one to be heard"


async def test_requests_of_a_closed_loop_count_from_their_sending(clock: Clock) -> None:
    run = LoadRun(FakeClient(), request, Counts(), clock=clock)
    await run.closed_loop(1, requests=2, warm_up=0)
    first, second = run.records
    assert second.start_s == second.sent_s == first.start_s + first.end_s
    assert (first.text_at_s[0], first.chunks[0].at_s, first.end_s) == (0.01, 0.02, 0.02)


async def test_errors_are_written_down_and_the_run_goes_on() -> None:
    failures: dict[int, OmniClientError] = {1: Internal("broken", stage="talker"), 2: Overloaded("full")}

    async def reply(number: int) -> AsyncIterator[Delta]:
        yield TextDelta("Hi")
        if number in failures:
            raise failures[number]

    run = LoadRun(FakeClient(reply), request, Counts())
    await run.closed_loop(2, requests=5, warm_up=0)
    found = {record.index: (record.error, record.stage) for record in run.records}
    assert found == {
        0: (None, None),
        1: ("internal", "talker"),
        2: ("overloaded", None),
        3: (None, None),
        4: (None, None),
    }
    assert all(record.text_at_s for record in run.records)


async def test_a_request_that_cannot_be_sent_is_an_error_too() -> None:
    def refuse(number: int) -> Request:
        return Request(text="hi", timeout=-1 if number == 0 else 1, request_id=str(number))

    run = LoadRun(FakeClient(), refuse, Counts())
    await run.closed_loop(1, requests=2, warm_up=0)
    assert [record.error for record in run.records] == ["bad_request", None]


async def test_a_place_waits_after_overloaded_as_the_server_asked(clock: Clock) -> None:
    async def reply(_number: int) -> AsyncIterator[Delta]:
        raise Overloaded("full", retry_after_ms=500)
        yield  # makes it a generator

    run = LoadRun(FakeClient(reply), request, Counts(), clock=clock)
    await run.closed_loop(1, requests=3, warm_up=0)
    assert [(record.start_s, record.end_s) for record in run.records] == [(0, 0), (0.5, 0), (1, 0)]
    assert clock.now_s == 1.5


async def test_an_open_loop_starts_requests_however_many_are_open() -> None:
    all_are_open = asyncio.Event()

    async def reply(number: int) -> AsyncIterator[Delta]:
        if number == 3:
            all_are_open.set()
        await all_are_open.wait()
        yield TextDelta("Hi")

    client = FakeClient(reply)
    run = LoadRun(client, request, Counts())
    arrivals = [0.0, 0.02, 0.04, 0.06, 99.0]
    await run.open_loop(arrivals, requests=3, warm_up=1)
    assert client.most_open == 4
    assert [record.start_s for record in sorted(run.records, key=lambda record: record.index)] == arrivals[:4]
    assert [record.warm_up for record in sorted(run.records, key=lambda record: record.index)] == [True] + [False] * 3
    assert all(record.start_s + record.end_s >= arrivals[3] for record in run.records)


async def test_latency_of_an_open_loop_counts_from_the_arrival_when_the_sender_is_late() -> None:
    def busy(number: int) -> Request:
        if number == 0:
            time.sleep(0.15)
        return request(number)

    run = LoadRun(FakeClient(), busy, Counts())
    await run.open_loop([0.0, 0.01], requests=2, warm_up=0)
    late = next(record for record in run.records if record.index == 1)
    assert late.start_s == 0.01
    assert late.sent_s >= 0.15
    assert late.text_at_s[0] >= 0.15 - 0.01 + 0.01


async def test_stopping_cuts_requests_off_and_keeps_their_records() -> None:
    stop = asyncio.Event()

    async def reply(number: int) -> AsyncIterator[Delta]:
        yield TextDelta("Hi")
        if number > 0:
            stop.set()
            await asyncio.Event().wait()

    client = FakeClient(reply)
    run = LoadRun(client, request, Counts())
    assert not await run_until(stop, run.closed_loop(2, requests=100, warm_up=0))
    assert client.open == 0
    assert client.left_early
    cut = [record for record in run.records if record.error == INTERRUPTED]
    assert sorted(record.index for record in cut) == sorted(client.left_early)
    assert all(record.text_at_s for record in cut)
    assert any(record.ok for record in run.records)


async def test_stopping_an_open_loop_sends_no_more() -> None:
    stop, counts = asyncio.Event(), Counts()

    async def reply(_number: int) -> AsyncIterator[Delta]:
        stop.set()
        yield TextDelta("Hi")

    run = LoadRun(FakeClient(reply), request, counts)
    assert not await run_until(stop, run.open_loop([0.0, 600.0], requests=2, warm_up=0))
    assert counts.sent == 1


async def test_a_run_that_ends_by_itself_says_so() -> None:
    run = LoadRun(FakeClient(), request, Counts())
    assert await run_until(asyncio.Event(), run.closed_loop(1, requests=1, warm_up=0))


async def test_a_fault_of_the_generator_itself_is_not_swallowed() -> None:
    async def work() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        await run_until(asyncio.Event(), work())


async def test_a_blocked_event_loop_is_noticed() -> None:
    begin = time.monotonic()
    async with LoopLag() as lag:
        await asyncio.sleep(0.05)
        time.sleep(0.12)
        await asyncio.sleep(0.05)
    assert 0.08 <= lag.worst_s <= time.monotonic() - begin
