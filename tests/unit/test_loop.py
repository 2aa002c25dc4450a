# SPDX-License-Identifier: Apache-2.0
"""The thread that owns a stage: order of commands, fairness to the engine, faults, stopping."""

import threading
import time

import pytest
import torch

from triton_omni.session.loop import IDLE_POLL_S, StageLoop
from waiting import IN_TIME_S, wait_for

CPU = torch.device("cpu")
COMMAND_S = 0.002


class Driven:
    """Counts calls; `work` steps are left; each call may raise once armed."""

    def __init__(self, work=0, delay=IDLE_POLL_S):
        self.work, self.delay = work, delay
        self.steps, self.polls, self.failures, self.threads = 0, 0, [], set()
        self.faults = {}

    def _enter(self, name):
        self.threads.add(threading.get_ident())
        if name in self.faults:
            raise self.faults[name]

    def has_work(self):
        self._enter("has_work")
        return self.work > 0

    def step(self):
        self._enter("step")
        self.steps += 1
        self.work -= 1

    def poll(self):
        self._enter("poll")
        self.polls += 1
        return self.delay

    def fail(self, error):
        self.failures.append(error)
        self.work = 0
        self._enter("fail")


@pytest.fixture
def rarely_polling(monkeypatch):
    """A loop that is not woken looks after itself too late for any test here to see it."""
    monkeypatch.setattr("triton_omni.session.loop.IDLE_POLL_S", 2 * IN_TIME_S)
    return Driven(delay=2 * IN_TIME_S)


@pytest.fixture
def run():
    loops = []

    def start(driven, **options):
        loops.append(StageLoop("test-loop", driven, CPU, **options))
        loops[-1].start()
        return loops[-1]

    yield start
    for loop in loops:
        loop.stop()
        assert not loop.alive


def done(loop):
    """Wait until everything posted so far has run."""
    event = threading.Event()
    loop.post(event.set)
    assert event.wait(IN_TIME_S)


def test_commands_run_in_the_order_of_posting_on_one_thread(run):
    driven, seen = Driven(work=50), []
    loop = run(driven)
    for n in range(500):
        loop.post(lambda n=n: seen.append((n, threading.get_ident())))
    done(loop)
    assert [n for n, _ in seen] == list(range(500))
    wait_for(lambda: driven.steps == 50)
    assert {thread for _, thread in seen} == driven.threads
    assert threading.get_ident() not in driven.threads


def test_commands_of_several_threads_keep_each_threads_order(run):
    loop, seen = run(Driven()), []
    posters = [
        threading.Thread(target=lambda p=p: [loop.post(lambda n=n: seen.append((p, n))) for n in range(200)])
        for p in range(4)
    ]
    for poster in posters:
        poster.start()
    for poster in posters:
        poster.join()
    done(loop)
    assert all([n for p, n in seen if p == poster] == list(range(200)) for poster in range(4))


def test_a_flood_of_commands_does_not_starve_the_engine(run):
    driven, flooding = Driven(work=20), [True]
    loop = run(driven)

    def again():
        if flooding[0]:
            loop.post(again)
            loop.post(lambda: None)

    loop.post(again)
    wait_for(lambda: driven.steps == 20)
    flooding[0] = False


def at_slow_commands(loop, count, look):
    """Return the results of `look` at each of `count` commands that were posted at once and take long together."""
    seen = []

    def command():
        seen.append(look())
        time.sleep(COMMAND_S)

    loop.post(lambda: [loop.post(command) for _ in range(count)])
    wait_for(lambda: len(seen) == count)
    return seen


def test_commands_are_not_interrupted(run):
    driven = Driven(work=1 << 40)
    assert len(set(at_slow_commands(run(driven), 8, lambda: driven.steps))) == 1


def test_sessions_are_polled_once_a_step(run):
    driven = Driven(work=30)
    run(driven)
    wait_for(lambda: driven.steps == 30)
    assert driven.polls >= 30


def test_an_idle_loop_polls_at_its_rate_and_no_faster(run):
    driven, begin = Driven(delay=IDLE_POLL_S), time.monotonic()
    run(driven)
    wait_for(lambda: driven.polls >= 5)
    assert time.monotonic() - begin >= 4 * IDLE_POLL_S


def test_a_poll_that_asks_to_look_again_soon_is_heard(run):
    driven = Driven(delay=0.001)
    run(driven)
    wait_for(lambda: driven.polls >= 20)


def test_a_command_wakes_an_idle_loop(run, rarely_polling):
    loop = run(rarely_polling)
    wait_for(lambda: rarely_polling.polls > 0)
    for _ in range(20):
        done(loop)


def test_an_engine_that_raises_is_told_and_commands_still_run(run):
    driven = Driven(work=1)
    driven.faults["step"] = RuntimeError("device lost")
    loop = run(driven)
    wait_for(lambda: driven.failures)
    assert driven.failures == [driven.faults["step"]]
    done(loop)
    assert loop.alive


def test_a_command_that_raises_does_not_lose_the_next(run):
    driven, seen = Driven(), []
    loop = run(driven)
    gate = threading.Event()
    loop.post(lambda: gate.wait(IN_TIME_S))
    loop.post(lambda: 1 / 0)
    loop.post(lambda: seen.append("next"))
    gate.set()
    done(loop)
    assert seen == ["next"]
    assert [type(error) for error in driven.failures] == [ZeroDivisionError]


def test_the_thread_lives_on_when_ending_the_sessions_raises_too(run):
    driven = Driven(work=1)
    driven.faults = {"step": RuntimeError("device lost"), "fail": RuntimeError("still lost")}
    loop = run(driven)
    wait_for(lambda: driven.failures)
    done(loop)
    assert loop.alive


def test_a_fault_that_stays_is_logged_once(run, caplog):
    driven = Driven()
    driven.faults = {"poll": RuntimeError("device lost"), "fail": RuntimeError("still lost")}
    run(driven)
    wait_for(lambda: len(driven.failures) >= 4)
    told = ["the stage's engine failed", "ending the sessions after the engine's failure failed as well"]
    assert [record.getMessage() for record in caplog.records] == told


def test_a_fault_that_stays_does_not_spin(run):
    driven = Driven()
    driven.faults["poll"] = RuntimeError("device lost")
    begin = time.monotonic()
    run(driven)
    wait_for(lambda: len(driven.failures) >= 5)
    # It rests after each of the first four.
    assert time.monotonic() - begin >= 4 * IDLE_POLL_S


def test_stop_runs_what_was_posted_first():
    driven, seen = Driven(work=10**9), []
    loop = StageLoop("test-loop", driven, CPU)
    loop.post(lambda: time.sleep(0.02))
    for n in range(50):
        loop.post(lambda n=n: seen.append(n))
    loop.post(lambda: loop.post(lambda: seen.append("posted by a command")))
    loop.start()
    assert loop.stop()
    assert seen == [*range(50), "posted by a command"]
    assert not loop.alive


def test_stop_waits_no_longer_than_asked(monkeypatch):
    driven = Driven(work=1)
    gate = threading.Event()
    driven.step = gate.wait
    loop = StageLoop("test-loop", driven, CPU)
    loop.start()
    join, waits = loop._thread.join, []
    monkeypatch.setattr(loop._thread, "join", lambda seconds: (waits.append(seconds), join(seconds)))
    assert not loop.stop(timeout_s=0.05)
    assert waits == [0.05]
    assert loop.alive
    driven.work = 0
    gate.set()
    assert loop.stop()
    assert not loop.alive


def test_who_posts_to_a_loop_that_has_ended_is_told_that_nothing_comes_of_it(run):
    loop, seen = run(Driven()), []
    assert loop.post(lambda: seen.append("run"))
    assert loop.stop()
    assert not loop.post(lambda: seen.append("never"))
    assert seen == ["run"]


def test_a_loop_that_is_woken_polls_at_once_and_once(run, rarely_polling):
    loop = run(rarely_polling)
    wait_for(lambda: rarely_polling.polls == 1)
    loop.wake()
    wait_for(lambda: rarely_polling.polls == 2)
    time.sleep(0.05)
    assert rarely_polling.polls == 2


def test_who_wakes_a_loop_during_its_poll_has_it_poll_again(run, rarely_polling):
    """The thing that it looked for may have come after the look."""
    polling, goes_on = threading.Event(), threading.Event()
    poll = rarely_polling.poll

    def slow_poll():
        polling.set()
        goes_on.wait(IN_TIME_S)
        return poll()

    rarely_polling.poll = slow_poll
    loop = run(rarely_polling)
    assert polling.wait(IN_TIME_S)
    loop.wake()
    goes_on.set()
    wait_for(lambda: rarely_polling.polls >= 2)
