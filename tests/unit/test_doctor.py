# SPDX-License-Identifier: Apache-2.0
"""The doctor: what is wrong with a server is named, what only moves is not, and it asks what there is to ask."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from triton_omni.core.endpoint import http_addresses
from triton_omni.doctor import cli, diagnosis
from triton_omni.doctor.cli import Server, examine
from triton_omni.doctor.diagnosis import OVERDUE_S, MetricsPage, Sample, findings
from triton_omni.doctor.stage_processes import running_for, server_processes, stage_processes
from triton_omni.session import ledger, ledger_table, ledger_view, server_folder
from triton_omni.session.ledger import SessionLedger, StageFacts
from triton_omni.session.ledger_table import BEAT, CLOSED, EPOCH, OPEN_REQUESTS, PID, Field, create_table
from triton_omni.session.ledger_view import StageBoard, read_ledger
from triton_omni.supervisor import leftovers, start

STAGES = ("thinker", "talker", "token2wav")
FIGURES = ("sessions", "running", "waiting", "kv_blocks_used", "rows_used", "outbox", "leaked_sessions")


class Clock:
    """The monotonic clock of a ledger and of who reads it; a test moves it."""

    now_ns = 1000_000_000_000

    def monotonic_ns(self) -> int:
        return self.now_ns

    def pass_by(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


class Rig:
    """A ledger with its three stages in this process, and a page of metrics that a test writes."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.name = f"triton-omni-test-{secrets.token_hex(6)}"
        self.path = server_folder.table_path(self.name)
        self.ledgers = {stage: SessionLedger(self.name, stage, StageFacts(1)) for stage in STAGES}
        self.figures = {stage: {"stage_starts": 1, **dict.fromkeys(FIGURES, 0)} for stage in STAGES}
        self.figures["thinker"]["sessions_limit"] = 8

    def open(self, slot: int = 0, seconds: float = 60.0):
        key = self.ledgers["thinker"].publish(slot)
        self.ledgers["thinker"].set_deadline(key, self.clock.now_ns + int(seconds * 1e9))
        return key

    def page(self) -> str:
        return "".join(
            f'omni_{name}{{stage="{stage}"}} {value}\n'
            for stage, figures in self.figures.items()
            for name, value in figures.items()
        )

    def sample(self) -> Sample:
        view = read_ledger(self.path)
        return Sample(view, {stage: view.held_by(stage) for stage in STAGES}, MetricsPage(self.page()))

    def wrong(self) -> dict[str, str]:
        return findings(self.sample())

    def close(self) -> None:
        for each in self.ledgers.values():
            each.close()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    clock = Clock()
    for module in (ledger, ledger_table, ledger_view):
        monkeypatch.setattr(module, "time", clock)
    made = Rig(clock)
    yield made
    made.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "LOOKS_APART_S", 0.01)
    monkeypatch.setattr(cli, "SETTLE_S", 0.001)
    monkeypatch.setattr(cli, "_ANSWERS_WITHIN_S", 100.0)
    monkeypatch.setattr(diagnosis, "_FETCH_TIMEOUT_S", 100.0)


@pytest.fixture
def answering(rig: Rig) -> Iterator[tuple[Server, dict[str, tuple[int, str]]]]:
    """A server that answers as Triton does, and what it answers by path."""
    answers = {"/v2/health/ready": (200, ""), "/v2/systemsharedmemory/status": (200, "[]")}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path) or (200, rig.page())
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    address = f"127.0.0.1:{listening.server_address[1]}"
    yield Server("server", f"http://{address}/metrics", rig.path, address), answers
    listening.shutdown()
    listening.server_close()
    thread.join()


def test_a_server_that_does_nothing_is_sound(rig: Rig) -> None:
    assert rig.wrong() == {}


def test_a_server_at_work_is_sound(rig: Rig) -> None:
    keys = [rig.open(slot) for slot in range(3)]
    rig.ledgers["talker"].write(keys[0], CLOSED)
    rig.figures["thinker"] |= {"sessions": 3, "running": 1, "waiting": 1, "kv_blocks_used": 9, "outbox": 2}
    rig.figures["talker"] |= {"sessions": 2, "running": 2, "rows_used": 80}
    rig.figures["token2wav"] |= {"sessions": 3, "running": 3, "waiting": 3, "kv_blocks_used": 72}
    assert rig.wrong() == {}


@pytest.mark.parametrize("stage", STAGES)
def test_a_session_that_a_stage_holds_and_nobody_opened_is_named(rig: Rig, stage: str) -> None:
    key = rig.open()
    rig.figures["thinker"]["sessions"] = 1
    rig.figures[stage]["sessions"] = 2
    assert list(rig.wrong()) == [f"{stage}/excess"]
    rig.figures[stage]["sessions"] = 1
    assert rig.wrong() == {}
    rig.ledgers[stage].write(key, CLOSED)
    assert f"{stage}/excess" in rig.wrong()
    assert "1 leaked" in rig.wrong()[f"{stage}/excess"]


def test_a_session_that_the_thinker_has_forgotten_is_named(rig: Rig) -> None:
    rig.open()
    assert rig.wrong() == {}, "its figures may be older than the session"
    view = read_ledger(rig.path)
    rig.clock.pass_by(1.01)
    assert "thinker/unheld" in rig.wrong()
    assert (view.sessions[0].age_s, read_ledger(rig.path).sessions[0].age_s) == (0, 1.01)


@pytest.mark.parametrize("figure", ["running", "waiting", "kv_blocks_used", "rows_used", "outbox"])
@pytest.mark.parametrize("stage", STAGES)
def test_what_an_engine_holds_without_a_session_is_named(rig: Rig, stage: str, figure: str) -> None:
    rig.figures[stage][figure] = 3
    assert f"{stage}/{figure}" in rig.wrong()


def test_more_sequences_than_sessions_are_named(rig: Rig) -> None:
    rig.open()
    for stage in STAGES:
        rig.figures[stage] |= {"sessions": 1, "running": 1, "waiting": 1}
    assert list(rig.wrong()) == ["thinker/sequences", "talker/sequences"]


def test_a_leak_that_a_stage_knows_of_is_named(rig: Rig) -> None:
    rig.figures["token2wav"]["leaked_sessions"] = 2
    assert rig.wrong() == {"token2wav/leaked": "token2wav says itself that 2 sessions it holds have long been over"}


def test_a_session_after_its_deadline_is_named_with_those_who_hold_it(rig: Rig) -> None:
    key = rig.open(7, seconds=-OVERDUE_S - 1)
    rig.figures["thinker"]["sessions"] = 1
    rig.ledgers["talker"].write(key, CLOSED)
    [(name, sentence)] = rig.wrong().items()
    assert name == f"session/{key.name}"
    assert sentence == f"session {key.name} is open 11 s after its deadline; not closed by thinker, token2wav"


def test_a_session_has_no_deadline_of_an_earlier_one_of_its_slot(rig: Rig) -> None:
    rig.figures["thinker"]["sessions"] = 1
    old = rig.open(7, seconds=-OVERDUE_S - 1)
    new = rig.ledgers["thinker"].publish(7)
    [session] = rig.sample().ledger.sessions
    assert (session.name, session.overdue_s) == (new.name, float("-inf"))
    assert session.age_s == 0
    rig.ledgers["thinker"].set_deadline(old, 1)
    assert rig.wrong() == {}


def test_a_stage_s_state_is_told(rig: Rig) -> None:
    board = StageBoard(rig.name)

    def say(field: Field, value: int) -> Callable[[], None]:
        return lambda: board.set_word(field, value, "talker")

    for set_up, name in (
        (lambda: board.set_word(BEAT, rig.clock.now_ns - 9_000_000_000, "talker"), "silent"),
        (rig.ledgers["talker"].say_broken, "broken"),
        (say(PID, 2**22 - 7), "gone"),
        (say(PID, 0), "left"),
        (lambda: board.mark_lost("talker"), "lost"),
        (say(EPOCH, 0), "absent"),
    ):
        set_up()
        rig.figures["talker"]["stage_starts"] = board.word(EPOCH, "talker")
        assert list(rig.wrong()) == [f"talker/{name}"]
        board.set_word(BEAT, rig.clock.now_ns, "talker")
    board.close()


def test_a_unary_model_that_has_died_is_told_until_it_is_loaded_again(rig: Rig) -> None:
    board = StageBoard(rig.name)
    with subprocess.Popen(["sleep", "60"]) as process:
        board.set_word(PID, process.pid, "unary")
        board.set_word(OPEN_REQUESTS, 2, "unary")
        assert rig.wrong() == {}
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and kept by its parent
        assert rig.wrong() == {
            "unary/gone": f"unary: process {process.pid} is gone with 2 requests open, and it is not loaded again yet"
        }
    assert list(rig.wrong()) == ["unary/gone"]
    board.set_word(PID, os.getpid(), "unary")
    board.set_word(OPEN_REQUESTS, 0, "unary")
    assert rig.wrong() == {}
    board.close()


def test_figures_of_the_process_before_are_not_believed(rig: Rig) -> None:
    rig.figures["talker"] |= {"sessions": 5, "rows_used": 9}
    assert list(rig.wrong()) == ["talker/excess"]
    again = SessionLedger(rig.name, "talker", StageFacts(1))
    assert rig.sample().figure("sessions", "talker") is None
    assert rig.wrong() == {}
    again.close()


@pytest.mark.usefixtures("quick")
def test_what_stays_is_told_and_what_goes_is_not(
    answering: tuple[Server, dict[str, tuple[int, str]]], rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, answers = answering
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if seconds == cli.LOOKS_APART_S:
            answers["/v2/health/ready"] = (200, "")

    monkeypatch.setattr(cli, "time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=sleep))
    assert examine(server, 5.0)[1] == {}
    assert cli.LOOKS_APART_S not in slept, "a sound server needs no second look"
    rig.figures["talker"]["sessions"] = 1
    answers["/v2/health/ready"] = (400, "")
    sample, wrong = examine(server, 0.4)
    assert slept.count(cli.LOOKS_APART_S) > 2
    assert list(wrong) == ["talker/excess"]
    assert sample.held("sessions", "talker") == 1


@pytest.mark.usefixtures("quick")
def test_what_a_client_left_registered_and_readiness_are_asked(
    answering: tuple[Server, dict[str, tuple[int, str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, answers = answering
    monkeypatch.setattr(cli, "_SHARED_MEMORY", tmp_path)
    (tmp_path / "there").touch()
    regions = [{"name": name, "key": f"/{name}", "offset": 0, "byte_size": 64} for name in ("there", "removed")]
    answers["/v2/systemsharedmemory/status"] = (200, json.dumps(regions))
    answers["/v2/health/ready"] = (400, "")
    assert list(examine(server, 0.0)[1]) == ["server/ready", "region/removed"]


@pytest.mark.usefixtures("quick")
def test_who_does_not_answer_is_named() -> None:
    nobody = Server("nobody", "http://127.0.0.1:9/metrics", Path("/dev/shm/none"), "127.0.0.1:9")
    assert list(examine(nobody, 0.0)[1]) == ["server/ledger", "server/metrics", "server/http"]


@pytest.mark.usefixtures("quick")
def test_the_command_tells_by_its_exit_code(
    answering: tuple[Server, dict[str, tuple[int, str]]],
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server, _ = answering
    rig.open()
    rig.figures["thinker"]["sessions"] = 1
    monkeypatch.setattr(cli, "running_servers", lambda: iter([server]))
    monkeypatch.setattr(cli, "own_folders", lambda: [Path(f"/dev/shm/triton-omni-0-1-{2**22 - 7}-1-0a")])
    monkeypatch.setattr(cli, "stale_regions", lambda: [Path("/dev/shm/triton_omni_x")])
    assert cli.main([]) == 1
    told = capsys.readouterr().out
    assert told.count("wrong: ") == 2
    assert "the next start removes it" in told
    monkeypatch.setattr(cli, "own_folders", list)
    monkeypatch.setattr(cli, "stale_regions", list)
    assert cli.main([]) == 0
    told = capsys.readouterr().out
    assert "1 sessions open, the oldest for 0." in told
    assert "7 of 8 slots free" in told
    assert told.endswith("sound\n")
    assert cli.main(["--metrics-url", server.metrics_url]) == 0
    rig.figures["talker"]["rows_used"] = 9
    assert cli.main(["--metrics-url", server.metrics_url, "--persist", "0.1"]) == 1
    assert "talker holds no session, and 9 rows of device memory" in capsys.readouterr().out


def test_without_any_server_nothing_is_sound(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "running_servers", lambda: iter(()))
    monkeypatch.setattr(cli, "leftovers", lambda: iter(()))
    assert cli.main([]) == 1
    said = "no server of this user runs here; --metrics-url names one elsewhere, and ./build.sh serve starts one"
    assert capsys.readouterr().out == f"wrong: {said}\n"
    with pytest.raises(SystemExit) as ended:
        cli.main(["--server", str(2**22 - 7)])
    assert ended.value.code == 1


@pytest.mark.usefixtures("quick")
def test_an_address_that_is_none_of_metrics_is_not_sound(
    answering: tuple[Server, dict[str, tuple[int, str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    server, answers = answering
    answers["/"] = (200, "")
    assert cli.main(["--metrics-url", f"http://{server.http_address}/", "--persist", "0"]) == 1
    assert "what answers there has no metrics of Triton" in capsys.readouterr().out
    answers["/"] = (200, "nv_inference_count 3\n")  # a server that was not asked yet
    assert cli.main(["--metrics-url", f"http://{server.http_address}/", "--persist", "0"]) == 0


def test_where_nothing_listens_that_is_said_with_how_to_start_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    url = "http://127.0.0.1:1/metrics"
    assert cli.main(["--metrics-url", url, "--persist", "0"]) == 1
    said = "the metrics cannot be read: nothing listens there (connection refused); ./build.sh serve starts one"
    assert capsys.readouterr().out == f"wrong: {url}: {said}\n"  # and no table of what nobody knows
    unknown = "http://host.invalid:1/metrics"
    assert cli.main(["--metrics-url", unknown, "--persist", "0"]) == 1
    told = capsys.readouterr().out
    assert told.startswith(f"wrong: {unknown}: the metrics cannot be read: ")
    assert "urlopen" not in told
    assert "build.sh" not in told


@pytest.mark.usefixtures("quick")
def test_a_port_that_does_not_speak_http_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"\x00\x00\x06\x04\n")

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/metrics"
        assert cli.main(["--metrics-url", url, "--persist", "0"]) == 1
    assert f"wrong: {url}: the metrics cannot be read: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--metrics-url", "localhost:8002", "'localhost:8002' is no URL such as http://HOST:8002/metrics"),
        ("--metrics-url", "http://", "'http://' is no URL such as http://HOST:8002/metrics"),
        ("--persist", "-1", "-1 is no number of seconds from 0 on"),
        ("--persist", "nan", "nan is no number of seconds from 0 on"),
        ("--persist", "long", "long is no number of seconds from 0 on"),
        ("--server", "thinker", "thinker is no whole number from 0 on"),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_what_is_allowed(
    option: str, value: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([option, value])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: argument {option}: {says}\n"


def test_another_process_than_a_tritonserver_is_told_with_those_there_are(
    answering: tuple[Server, dict[str, tuple[int, str]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "running_servers", lambda: iter([answering[0]]))
    for pid, says in ((os.getpid(), "is no tritonserver with stages loaded"), (2**22 - 7, "does not run")):
        with pytest.raises(SystemExit) as ended:
            cli.main(["--server", str(pid)])
        assert ended.value.code == 1
        said = f"error: --server: process {pid} {says}; this user's servers here: {answering[0].name}\n"
        assert capsys.readouterr().err == said


@pytest.mark.usefixtures("quick")
def test_figures_are_whole_where_a_terminal_is_narrow(
    answering: tuple[Server, dict[str, tuple[int, str]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    cli.main(["--metrics-url", answering[0].metrics_url])
    told = capsys.readouterr().out
    assert "token2wav" in told
    assert "…" not in told


def test_a_server_is_found_by_its_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    name = server_folder.ledger_name(os.getpid())
    create_table(name)
    assert any(server.ledger == server_folder.table_path(name) for server in cli.running_servers())
    assert not any(name in sentence for _, sentence in cli.leftovers())
    server_folder.remove_folder(name)


@pytest.mark.parametrize(
    ("arguments", "addresses"),
    [
        ([], ("127.0.0.1:8000", "127.0.0.1:8002")),
        (["--http-address=10.0.0.7", "--metrics-port=9"], ("10.0.0.7:8000", "10.0.0.7:9")),
        (["--http-address", "::", "--metrics-address=::2"], ("127.0.0.1:8000", "[::2]:8002")),
        (["--allow-http=false", "--allow-metrics=0"], ("", "")),
    ],
)
def test_addresses_are_where_the_arguments_make_it_listen(arguments: list[str], addresses: tuple[str, str]) -> None:
    assert http_addresses(arguments) == addresses


def test_regions_are_stale_whose_supervisor_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_SHARED_MEMORY", tmp_path)
    with subprocess.Popen(["sleep", "60"]) as supervisor:
        region = tmp_path / f"{leftovers.new_region_prefix(supervisor.pid)}x"
        region.touch()
        assert leftovers.stale_regions() == [], "it may be about to be mapped"
        supervisor.kill()
    assert leftovers.stale_regions() == [region]
    assert leftovers.remove_stale_regions() == [region.name]


# A server that starts, and stages that start again.


def test_sessions_of_a_dead_stage_are_nobody_s_fault_once_it_is_loaded_again(rig: Rig) -> None:
    """Nobody ends them: the dead process would have."""
    for slot in range(3):
        rig.open(slot, seconds=-OVERDUE_S - 1)
    rig.figures["thinker"]["sessions"] = 3
    assert len(rig.wrong()) == 3
    board = StageBoard(rig.name)
    board.mark_lost("thinker")
    assert list(rig.wrong()) == ["thinker/lost"]
    again = SessionLedger(rig.name, "thinker", StageFacts(1))
    rig.figures["thinker"] |= {"stage_starts": 2, "sessions": 0}
    rig.clock.pass_by(1.01)  # a session is missed from the thinker's figures only once it has been open for a while
    assert rig.wrong() == {}
    key = again.publish(3)
    again.set_deadline(key, 1)
    assert f"session/{key.name}" in rig.wrong(), "a session of the new process is looked at"
    again.close()
    board.close()


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_loads_again_is_named_with_its_new_process(rig: Rig, stage: str) -> None:
    board, pid = StageBoard(rig.name), os.getpid()
    rig.ledgers[stage].say_broken()
    sample = replace(rig.sample(), loading={stage: 4711})
    assert findings(sample)[f"{stage}/broken"] == (
        f"{stage}: its engine has failed (start 1) and it loads again as process 4711"
    )
    board.mark_lost(stage)
    sample = replace(rig.sample(), loading={stage: 4711})
    assert findings(sample)[f"{stage}/lost"] == (
        f"{stage} has died (process {pid}, start 1) and loads again as process 4711"
    )
    assert rig.wrong()[f"{stage}/lost"] == f"{stage} has died (process {pid}, start 1) and is not loaded again yet"
    board.close()


@pytest.fixture
def nowhere() -> str:
    """An address where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        return f"127.0.0.1:{reserved.getsockname()[1]}"


@pytest.mark.parametrize(
    ("loaded", "told"),
    [
        ([], "no stage is loaded, thinker, talker, token2wav not yet"),
        (["token2wav"], "loaded is token2wav, thinker, talker not yet"),
        (["talker", "token2wav"], "loaded are talker, token2wav, thinker not yet"),
    ],
)
def test_a_server_that_is_not_up_yet_starts_and_has_no_other_fault(
    nowhere: str, loaded: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server("server 7", f"http://{nowhere}/metrics", Path("/dev/shm/none"), nowhere, os.getpid())
    monkeypatch.setattr(cli, "loaded_stages", lambda pid: loaded if pid == os.getpid() else [])
    monkeypatch.setattr(cli, "running_for", lambda pid: 34.4)
    monkeypatch.setattr(cli, "running_servers", lambda: iter([server]))
    monkeypatch.setattr(cli, "leftovers", lambda: iter(()))
    assert cli.main(["--persist", "3600"]) == 1
    assert capsys.readouterr().out == f"starting: server 7: it has been starting for 34 s: {told}\n"


@pytest.mark.usefixtures("quick")
def test_a_server_whose_stages_are_loaded_and_that_listens_nowhere_does_not_start(
    rig: Rig, nowhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "loaded_stages", lambda _: list(STAGES))
    server = Server("server", "", rig.path, nowhere, os.getpid())
    assert list(examine(server, 0.0)[1]) == ["server/http"]


@pytest.mark.usefixtures("quick")
def test_a_server_that_listens_does_not_start(
    answering: tuple[Server, dict[str, tuple[int, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "loaded_stages", lambda _: [])
    assert examine(replace(answering[0], pid=os.getpid()), 0.0)[1] == {}


def test_what_a_ledger_says_is_loaded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "ledger_name", lambda pid: rig.name)
    assert start.loaded_stages(1) == list(STAGES)
    board = StageBoard(rig.name)
    board.set_word(EPOCH, 0, "talker")
    assert start.loaded_stages(1) == ["thinker", "token2wav"]
    board.close()
    monkeypatch.setattr(start, "ledger_name", lambda pid: "triton-omni-no-such")
    assert start.loaded_stages(1) == []


def test_servers_and_their_stages_are_found_by_their_processes(tmp_path: Path) -> None:
    """A child of this process stands for a stage, one by the server's name and with its option for a server."""
    (tmp_path / "tritonserver").symlink_to(sys.executable)
    sleeping = "import time; time.sleep(600)"
    for stage in ("talker", "qwen2_5_omni_unary"):
        (tmp_path / stage / "1").mkdir(parents=True)
        (tmp_path / stage / "1" / "model.py").write_text(sleeping)
    option = "--backend-config=python,shm-region-prefix-name="
    with contextlib.ExitStack() as stack:

        def start(*command: str) -> int:
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.kill)
            return process.pid

        ours = start(str(tmp_path / "tritonserver"), "-c", sleeping, f"{option}triton_omni_0-1_")
        strangers = start(str(tmp_path / "tritonserver"), "-c", sleeping, f"{option}else_")
        other = start(sys.executable, "-c", sleeping, f"{option}triton_omni_0-1_")
        talker = start(sys.executable, str(tmp_path / "talker" / "1" / "model.py"))
        start(sys.executable, str(tmp_path / "qwen2_5_omni_unary" / "1" / "model.py"))
        while ours not in (found := set(server_processes())):  # its name is its parent's until it has begun
            time.sleep(0.01)
        assert not found & {strangers, other}
        while talker not in stage_processes(os.getpid()).values():
            time.sleep(0.01)
        assert stage_processes(os.getpid()) == {"talker": talker}
        assert 0 <= running_for(ours) < 600
        assert ours in (server.pid for server in cli.running_servers())
