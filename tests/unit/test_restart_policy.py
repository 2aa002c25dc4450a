# SPDX-License-Identifier: Apache-2.0
"""A stage's death is seen, told and undone, with a fake ledger and a fake Triton around processes that really end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from triton_omni.core.errors import StageName
from triton_omni.session.ledger_table import HELD, PID, STACKS_SIGNAL, STAGES, WATCHED, Field
from triton_omni.supervisor import restart
from triton_omni.supervisor.model_control import ModelControlError
from triton_omni.supervisor.restart import MODELS, RestartPolicy, Silence, StageRestarter, Starts
from waiting import FOREVER_S, IN_TIME_S, wait_for

QUICK = RestartPolicy(first_wait_s=0.0)
PROCESSES = {model: process for process, model in MODELS.items()}


@dataclass
class Server:
    """Stages that are `sleep`s, the ledger's words about them, and Triton's two calls."""

    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    silent: dict[str, float] = field(default_factory=dict)
    overdue: set[str] = field(default_factory=set)
    open: set[str] = field(default_factory=set)
    """Models with requests that nobody else could end."""
    ended: int = 0
    """Number of times that the whole server was ended."""
    faults: int = 0
    """Failed loads that were counted."""
    told_ready: list[bool] = field(default_factory=list)
    """Readiness as the restarter tells it, each change once."""
    refusals: list[str] = field(default_factory=list)
    """Why the next loads fail."""
    unload_refusal: str = ""
    """Why unloads fail; empty = they do not."""
    dying: bool = False
    """True if a stage dies as soon as it was loaded."""
    leaves: bool = True
    """True if a stage that lives ends when it is unloaded."""
    loading: threading.Event = field(default_factory=threading.Event)
    may_load: threading.Event = field(default_factory=threading.Event)
    stopping: threading.Event = field(default_factory=threading.Event)
    held: dict[str, bool] = field(default_factory=dict)
    forgotten: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(self, stage: str) -> None:
        self.processes[stage] = subprocess.Popen(["sleep", "600"])
        self.broken.discard(stage)
        self.silent.pop(stage, None)

    def kill(self, stage: str) -> None:
        self.processes[stage].kill()

    # The restarter's view.

    def word(self, declared: Field, model: StageName) -> int:
        assert declared is PID
        return self.processes[model].pid if model in self.processes else 0

    def silent_for(self, stage: StageName) -> float:
        return self.silent.get(stage, 0.0)

    def is_broken(self, stage: StageName) -> bool:
        return stage in self.broken

    def holds_overdue(self, stage: StageName) -> bool:
        return stage in self.overdue

    def count_fault(self) -> None:
        self.faults += 1

    def leaves_open(self, stage: StageName) -> bool:
        return stage in self.open

    def mark_lost(self, stage: StageName) -> None:
        self.calls.append(("lost", stage))

    def set_word(self, declared: Field, value: int, model: StageName) -> None:
        assert declared is HELD
        self.held[model] = bool(value)

    def end(self) -> None:
        self.ended += 1

    def tell_ready(self, ready: bool) -> None:
        if self.told_ready[-1:] != [ready]:
            self.told_ready.append(ready)

    def unload(self, model: str) -> None:
        model = PROCESSES[model]
        self.calls.append(("unload", model))
        if self.unload_refusal:
            raise ModelControlError(self.unload_refusal)
        if self.leaves:
            self.processes[model].terminate()

    def load(self, model: str) -> None:
        model = PROCESSES[model]
        self.calls.append(("load", model))
        self.loading.set()
        deadline = time.monotonic() + IN_TIME_S
        while (self.held[model] or not self.may_load.is_set()) and not self.stopping.is_set():
            assert time.monotonic() < deadline, "a stage was held for ever"
            time.sleep(0.002)
        if self.stopping.is_set():
            raise ModelControlError("the server is gone")
        if self.refusals:
            raise ModelControlError(self.refusals.pop(0))
        self.forgotten.append(self.processes[model])
        self.run(model)
        if self.dying:
            self.kill(model)

    def loads(self) -> int:
        return sum(call == "load" for call, _ in self.calls)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    server.may_load.set()
    for stage in WATCHED:
        server.run(stage)
    yield server
    for process in [*server.processes.values(), *server.forgotten]:
        process.kill()
        process.wait()


@contextlib.contextmanager
def watching(server: Server, policy: RestartPolicy = QUICK) -> Iterator[StageRestarter]:
    restarter = StageRestarter(server, server, policy, server.tell_ready, server.end)
    with pytest.MonkeyPatch.context() as patch:
        # However late the watch looks again, it has not slept.
        patch.setattr(restart, "_PAUSED_S", FOREVER_S)
        restarter.start()
        try:
            yield restarter
        finally:
            restarter.close()
            server.stopping.set()
            restarter.join(IN_TIME_S)


def test_the_new_process_loads_nothing_before_the_old_one_has_ended(server: Server) -> None:
    server.leaves, old = False, server.processes["talker"]
    with watching(server) as restarter:
        server.broken.add("talker")
        wait_for(lambda: server.loads() == 1)
        time.sleep(0.1)
        assert server.held["talker"]
        old.terminate()
        wait_for(lambda: not restarter.is_restarting)
        assert not server.held["talker"]


@pytest.mark.parametrize("stage", WATCHED)
def test_a_killed_stage_is_told_at_once_and_started_again(server: Server, stage: StageName) -> None:
    with watching(server) as restarter:
        for deaths in (1, 2):
            server.calls.clear()
            server.kill(stage)
            wait_for(lambda: server.loads() == 1 and not restarter.is_restarting)
            told = [] if stage == "unary" else [("lost", stage)]
            assert server.calls == [*told, ("unload", stage), ("load", stage)]
            assert restarter.deaths == deaths * len(told)
    assert restarter.failure is None


def test_a_stage_that_could_not_be_unloaded_is_told_and_started_again(
    server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    server.unload_refusal = "failed to connect to all addresses"
    with watching(server) as restarter:
        server.kill("talker")
        wait_for(lambda: server.loads() == 1 and not restarter.is_restarting)
    said = capfd.readouterr().err.splitlines()
    assert said.count("talker: it could not be unloaded: failed to connect to all addresses") == 1


@pytest.mark.parametrize("stage", WATCHED)
def test_where_requests_would_never_end_the_whole_server_is_ended_at_once(server: Server, stage: StageName) -> None:
    with watching(server, replace(QUICK, whole_server=True)) as restarter:
        server.kill(stage)
        wait_for(lambda: server.ended == 1)
        wait_for(lambda: not restarter._thread.is_alive())
    assert server.calls == []
    assert (restarter.ended_for, restarter.failure, restarter.deaths) == (f"{stage}: its process ended", None, 1)


def test_a_stage_that_hangs_ends_the_whole_server_where_its_requests_would_never_end(server: Server) -> None:
    with watching(server, replace(QUICK, whole_server=True, stalled_after_s=30.0)) as restarter:
        server.silent["talker"] = 31.0
        wait_for(lambda: server.ended == 1)
    assert server.calls == []
    assert restarter.ended_for == "talker: it did nothing for 30 s and was ended"


def test_of_a_failed_engine_s_process_that_lives_the_server_is_not_ended(server: Server) -> None:
    """It ends its own requests."""
    with watching(server, replace(QUICK, whole_server=True)) as restarter:
        server.broken.add("talker")
        wait_for(lambda: server.loads() == 1 and not restarter.is_restarting)
    assert server.ended == 0
    assert server.calls == [("unload", "talker"), ("load", "talker")]


def test_a_failed_engine_s_process_that_does_not_leave_ends_the_server_as_one_that_died(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "_LEAVES_WITHIN_S", 0.2)
    server.leaves = False
    with watching(server, replace(QUICK, whole_server=True)) as restarter:
        server.broken.add("talker")
        wait_for(lambda: server.ended == 1)
        server.stopping.set()
        wait_for(lambda: not restarter.is_restarting)
    assert restarter.ended_for == "talker: it did not leave and was ended"


@pytest.mark.parametrize("open_requests", [False, True])
def test_the_unary_model_is_started_again_alone_unless_it_had_requests(server: Server, open_requests: bool) -> None:
    server.open.update(["unary"] if open_requests else [])
    with watching(server) as restarter:
        server.kill("unary")
        wait_for(lambda: server.ended == 1 if open_requests else server.loads() == 1 and not restarter.is_restarting)
    loaded = [("unload", "unary"), ("load", "unary")]
    assert server.calls == ([] if open_requests else loaded)


def test_a_death_is_told_in_the_moment_in_which_it_happens(server: Server) -> None:
    """If another stage ended a session before it hears of the death, nobody would answer the client."""
    with watching(server, replace(QUICK, look_every_s=FOREVER_S)):
        time.sleep(0.1)
        server.kill("talker")
        wait_for(lambda: ("lost", "talker") in server.calls)
        wait_for(lambda: server.loads() == 1)
        server.kill("thinker")  # so that the watch, which waits for long here, sees that it is over


def test_stages_that_live_are_left_alone(server: Server) -> None:
    with watching(server) as restarter:
        time.sleep(3 * QUICK.look_every_s)
        assert not restarter.is_restarting
    assert server.calls == []


def test_a_stage_whose_engine_failed_leaves_in_order_and_nothing_is_lost_of_it(server: Server) -> None:
    old = server.processes["talker"]
    with watching(server) as restarter:
        server.broken.add("talker")
        wait_for(lambda: server.loads() == 1 and not restarter.is_restarting)
        assert server.calls == [("unload", "talker"), ("load", "talker")]
        assert restarter.deaths == 0
    assert old.poll() == -signal.SIGTERM


def test_a_stage_whose_engine_failed_and_that_does_not_leave_is_ended_by_force(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "_LEAVES_WITHIN_S", 0.2)
    server.leaves, old = False, server.processes["talker"]
    with watching(server) as restarter:
        server.broken.add("talker")
        wait_for(lambda: server.loads() == 1 and not restarter.is_restarting)
        assert sorted(server.calls) == [("load", "talker"), ("lost", "talker"), ("unload", "talker")]
    assert old.poll() == -signal.SIGKILL


def test_a_stage_that_hangs_is_ended_and_started_again(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    old = server.processes["thinker"]
    os.kill(old.pid, signal.SIGSTOP)
    with watching(server, RestartPolicy(first_wait_s=0.0, stalled_after_s=30.0)) as restarter:
        server.silent["thinker"] = 31.0
        wait_for(lambda: server.loads() == 1 and not restarter.is_restarting)
        assert server.calls == [("lost", "thinker"), ("unload", "thinker"), ("load", "thinker")]
    assert old.poll() == -signal.SIGKILL
    assert "thinker: it did nothing for 30 s and was ended\n" in capfd.readouterr().err


def test_a_stage_that_hangs_tells_where_before_it_ends(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "_WRITES_WITHIN_S", IN_TIME_S)
    log = tmp_path / "log"
    hangs = (
        "import faulthandler, signal, sys, time\n"
        f"faulthandler.register({int(STACKS_SIGNAL)}, chain=True)\n"
        "def step():\n    print('stepping', flush=True)\n    time.sleep(600)\n"
        "step()"
    )
    with log.open("w") as stderr:
        old = subprocess.Popen([sys.executable, "-c", hangs], stdout=subprocess.PIPE, stderr=stderr)
    assert old.stdout is not None
    with old.stdout as stepping:
        assert stepping.readline() == b"stepping\n"
    server.kill("thinker")
    server.processes["thinker"].wait()
    server.processes["thinker"] = old
    with watching(server) as restarter:
        server.silent["thinker"] = 301.0
        wait_for(lambda: server.loads() == 1 and not restarter.is_restarting)
    assert old.poll() == -STACKS_SIGNAL
    assert "in step" in log.read_text()


@pytest.mark.parametrize(
    ("silent_s", "overdue", "ended_after_s"),
    [(29.0, True, None), (31.0, False, None), (31.0, True, 30), (299.0, False, None), (301.0, False, 300)],
)
def test_a_stage_that_hangs_is_ended_sooner_if_a_deadline_has_passed(
    server: Server, capfd: pytest.CaptureFixture[str], silent_s: float, overdue: bool, ended_after_s: int | None
) -> None:
    server.overdue.update(["talker", "token2wav"] if overdue else [])
    with watching(server) as restarter:
        server.silent["token2wav"] = silent_s
        if ended_after_s is None:
            time.sleep(3 * QUICK.look_every_s)
        else:
            wait_for(lambda: server.loads() == 1 and not restarter.is_restarting)
    lost = [] if ended_after_s is None else [f"token2wav: it did nothing for {ended_after_s} s and was ended"]
    assert [line for line in capfd.readouterr().err.splitlines() if "was ended" in line] == lost
    assert server.loads() == len(lost)


def test_a_server_is_not_ready_while_a_stage_is_silent(server: Server) -> None:
    with watching(server) as restarter:
        server.silent["thinker"] = 9.0
        wait_for(lambda: server.told_ready)
        time.sleep(3 * QUICK.look_every_s)
        assert server.told_ready == [True]
        server.silent["thinker"] = 11.0
        wait_for(lambda: server.told_ready == [True, False])
        del server.silent["thinker"]
        wait_for(lambda: server.told_ready == [True, False, True])
        assert not restarter.is_restarting


def test_a_server_whose_silent_stage_was_ended_is_not_told_ready_before_it_is_loaded(server: Server) -> None:
    server.may_load.clear()
    with watching(server, RestartPolicy(first_wait_s=0.0, stalled_after_s=30.0)) as restarter:
        server.silent["thinker"] = 31.0
        wait_for(server.loading.is_set)
        time.sleep(2 * QUICK.look_every_s)
        assert server.told_ready[-1] is False
        server.may_load.set()
        wait_for(lambda: not restarter.is_restarting and server.told_ready[-1])


def test_what_the_watch_itself_slept_through_is_not_held_against_a_stage(server: Server) -> None:
    silence = Silence(server)
    server.silent["talker"] = 5.0
    silence.look(now=1000.0)
    assert silence.of("talker") == 5.0
    server.silent["talker"] = 605.0
    silence.look(now=1600.0)
    assert silence.of("talker") == 0.0
    for tenth in range(1, 101):
        silence.look(now=1600.0 + tenth / 10)
    server.silent["talker"] = 615.0
    assert silence.of("talker") == pytest.approx(10.0)


def test_two_stages_that_die_are_started_side_by_side(server: Server) -> None:
    server.may_load.clear()
    with watching(server) as restarter:
        server.kill("thinker")
        wait_for(server.loading.is_set)
        server.kill("token2wav")
        wait_for(lambda: server.loads() == 2)
        server.may_load.set()
        wait_for(lambda: not restarter.is_restarting)
        assert restarter.deaths == 2
        assert {stage for call, stage in server.calls if call == "load"} == {"thinker", "token2wav"}


def test_a_load_that_fails_is_tried_again(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    server.refusals = ["out of memory"]
    with watching(server) as restarter:
        server.kill("talker")
        wait_for(lambda: server.loads() == 2 and not restarter.is_restarting)
        assert restarter.failure is None
    assert "talker: it could not be loaded: out of memory\n" in capfd.readouterr().err
    assert server.faults == 1


def test_a_stage_that_cannot_be_loaded_is_given_up_in_one_sentence(server: Server) -> None:
    server.refusals = ["out of memory"] * 9
    with watching(server, RestartPolicy(attempts=3, window_s=60.0, first_wait_s=0.0)) as restarter:
        server.kill("talker")
        wait_for(lambda: restarter.failure is not None)
        assert server.loads() == 3
    assert restarter.failure == "talker does not stay (starts in 60 s: 3): it could not be loaded: out of memory"


def test_why_a_stage_was_given_up_is_not_replaced_by_its_being_dead(server: Server) -> None:
    def stands_still_until_given_up(stage: StageName) -> float:
        if server.loads() and threading.current_thread().name == "stage-watch":
            wait_for(lambda: restarter.failure is not None and not restarter.is_restarting)
        return 0.0

    server.silent_for = stands_still_until_given_up  # type: ignore[method-assign]
    server.refusals = ["no memory"]
    with watching(server, RestartPolicy(attempts=1)) as restarter:
        server.kill("talker")
        wait_for(lambda: not restarter._thread.is_alive())
        assert str(restarter.failure).endswith("it could not be loaded: no memory")


def test_a_stage_that_dies_again_and_again_is_given_up(server: Server) -> None:
    server.dying = True
    with watching(server, RestartPolicy(attempts=2, window_s=60.0, first_wait_s=0.0)) as restarter:
        server.kill("token2wav")
        wait_for(lambda: restarter.failure is not None)
        assert server.loads() == 2
    assert restarter.failure == "token2wav does not stay (starts in 60 s: 2): its process ended"


def test_starts_long_ago_do_not_count(server: Server) -> None:
    with watching(server, RestartPolicy(attempts=1, window_s=0.0, first_wait_s=0.0)) as restarter:
        for loads in (1, 2, 3):
            server.kill("talker")
            wait_for(lambda loads=loads: server.loads() == loads and not restarter.is_restarting)  # type: ignore[misc]
        assert restarter.failure is None


def test_the_first_start_is_made_at_once_and_waits_double() -> None:
    assert [RestartPolicy().wait_s(earlier) for earlier in range(5)] == [0.0, 1.0, 2.0, 4.0, 8.0]


def test_starts_within_the_window_are_bounded_and_wait_ever_longer() -> None:
    starts = Starts(RestartPolicy(attempts=3, window_s=60.0))
    waits = []
    while not starts.are_exhausted():
        waits.append(starts.count_start())
    assert waits == [0.0, 1.0, 2.0]
    assert starts.sentence("the server", "x") == "the server does not stay (starts in 60 s: 3): x"


def test_what_ends_after_the_close_is_left_dead(server: Server) -> None:
    with watching(server) as restarter:
        restarter.close()
        for stage in STAGES:
            server.kill(stage)
        time.sleep(2 * QUICK.look_every_s)
    assert server.calls == []


def test_a_close_ends_a_wait_before_the_next_start(server: Server) -> None:
    server.refusals = ["no"]
    with watching(server, RestartPolicy(first_wait_s=FOREVER_S)) as restarter:
        server.kill("talker")
        wait_for(lambda: server.loads() == 2)
        restarter.close()
        server.stopping.set()
        restarter.join(IN_TIME_S)
        assert not restarter.is_restarting
        assert server.held["talker"]


def test_a_server_without_stages_is_not_watched() -> None:
    server = Server()
    with watching(server):
        time.sleep(2 * QUICK.look_every_s)
    assert server.calls == []
