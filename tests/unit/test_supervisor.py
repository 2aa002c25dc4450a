# SPDX-License-Identifier: Apache-2.0
"""The supervisor against a stand-in for tritonserver: start, readiness, death, ports, signals, stop."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from processes import children, is_running
from triton_omni.core.profile import Profile
from triton_omni.core.settings import TalkerSettings, ThinkerSettings
from triton_omni.session import server_folder
from triton_omni.session.ledger_table import BEAT, EPOCH, PID, Field, create_table
from triton_omni.session.ledger_view import StageBoard
from triton_omni.supervisor import leftovers, serve
from triton_omni.supervisor.machine import ServerError, ServerNotReady, choose_ports, find_triton, visible_gpus
from triton_omni.supervisor.model_control import ModelControl
from triton_omni.supervisor.model_folder import ModelFolderError, check_files, model_folder
from triton_omni.supervisor.model_folder import main as print_model_folder
from triton_omni.supervisor.options import ServerConfig
from triton_omni.supervisor.restart import RestartPolicy, StageRestarter
from triton_omni.supervisor.serve import Supervisor, main, on_signals
from triton_omni.supervisor.start import memory_pool_bytes, pool_bytes
from waiting import FOREVER_S, IN_TIME_S, wait_for

# Answers the readiness path as tritonserver does; what it should do otherwise is told by its environment.
STAND_IN = '''#!{python}
import http.server, json, os, signal, subprocess, sys, threading, time
STAGE = """import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1] + ".new", "w").write(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)"""
if sys.argv[1:] == ["--help"]:
    print("Usage: tritonserver [options]\\n  --help\\n\\tPrint usage\\n", file=sys.stderr)
    print(os.environ.get("OPTIONS", ""), file=sys.stderr)
    sys.exit(1)
flags = dict(argument[2:].split("=", 1) for argument in sys.argv[1:])
behaviour = os.environ.get("BEHAVIOUR", "serve")
if stage := os.environ.get("STAGE"):  # a child that outlives its parent and ignores SIGTERM, as Triton's stubs do
    subprocess.Popen([sys.executable, "-c", STAGE, stage])
    while not os.path.exists(stage):
        time.sleep(0.01)
preload = os.environ.get("LD_PRELOAD", "")
print(json.dumps({{"flags": flags, "model": os.environ["OMNI_MODEL"], "preload": preload}}), flush=True)
if behaviour == "fail":
    print("E1121 02:22:03.042 42 model_lifecycle.cc:654] \\"failed to load 'thinker' version 1: "
          "Internal: SettingsError: stage.yaml: engine.x: unknown\\\\n\\\\nAt:\\\\n  model.py(6): initialize\\"")
    print("error: creating server: Internal - failed to load all models", flush=True)
    sys.exit(1)
if behaviour == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(int(os.environ.get("CODE", "0"))))
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if behaviour == "loading" else 200)
        self.end_headers()
        if self.path == "/v2":
            self.wfile.write(json.dumps({{"version": os.environ.get("VERSION", "2.51.0")}}).encode())
    def log_message(self, *_): pass
def listen(service):
    return http.server.HTTPServer((flags[service + "-address"], int(flags[service + "-port"])), Ready)
if behaviour == "no metrics":  # ready already, as tritonserver is when it finds that port taken
    threading.Thread(target=listen("http").serve_forever, daemon=True).start()
    time.sleep(0.5)
    print("E1121 02:22:03.042 42 main.cc:293] \\"failed to start Metrics service: "
          "Unavailable - Socket already in use\\"",
          flush=True)
    os._exit(1)
threading.Thread(target=listen("metrics").serve_forever, daemon=True).start()
http = listen("http")
def hang_up(*_):
    http.server_close()
    time.sleep(600)
signal.signal(signal.SIGUSR1, hang_up)
http.serve_forever()
'''


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model repository, with a stand-in tritonserver first on PATH and a checkpoint in OMNI_MODEL."""
    binary = tmp_path / "bin" / "tritonserver"
    binary.parent.mkdir()
    binary.write_text(STAND_IN.format(python=sys.executable))
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(binary.parent), prepend=os.pathsep)
    monkeypatch.delenv("TRITON_HOME", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({"thinker_config": {"text_config": {"hidden_size": 64}}}))
    monkeypatch.setenv("OMNI_MODEL", str(checkpoint))
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def config(repository: Path, **changes: object) -> ServerConfig:
    given = {"model": os.environ["OMNI_MODEL"], "log_path": repository.parent / "server.log", **changes}
    return ServerConfig(repository, **given)  # type: ignore[arg-type]


def told(repository: Path) -> dict[str, Any]:
    """Return the stand-in's report of itself. It is ready before a thread has copied its output into the log."""
    log = repository.parent / "server.log"
    wait_for(lambda: log.read_text().endswith("\n"))
    said: dict[str, Any] = json.loads(log.read_text())
    return said


@pytest.fixture
def no_forced_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that ends by itself is ended by nobody else, however slow it is."""
    monkeypatch.setattr("triton_omni.supervisor.server_run._ALONE_S", FOREVER_S)
    monkeypatch.setattr("triton_omni.supervisor.server_run.KILL_AFTER_S", FOREVER_S)


@pytest.mark.usefixtures("no_forced_end")
def test_serves_on_free_loopback_ports_and_stops_cleanly(repository: Path) -> None:
    with Supervisor(config(repository)) as server:
        assert server.http_url.startswith("127.0.0.1:")
        assert len({server.http_url, server.grpc_url, server.metrics_url}) == 3
        assert server.exit_code is None
        server.stop()
        assert server.exit_code == 0
    said = told(repository)
    assert said["flags"]["http-address"] == said["flags"]["grpc-address"] == said["flags"]["metrics-address"]
    assert said["flags"]["grpc-port"] == server.grpc_url.rpartition(":")[2]
    assert said["model"] == os.environ["OMNI_MODEL"]


def test_without_a_gpu_the_server_is_not_asked_for_what_needs_one(repository: Path) -> None:
    with Supervisor(config(repository)):
        flags = told(repository)["flags"]
    assert flags["pinned-memory-pool-byte-size"] == "0"
    assert flags["allow-gpu-metrics"] == "false"
    assert "cuda-memory-pool-byte-size" not in flags


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("allowed", [False, True])
def test_a_server_gets_only_the_options_that_its_program_knows(
    repository: Path, known: bool, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if known:
        options = "  --allow-client-shm <boolean>\n\tx\n  --http-max-input-size <integer>"
        monkeypatch.setenv("OPTIONS", options)
    (repository / "thinker" / "1").mkdir(parents=True)
    (repository / "thinker" / "1" / "stage.yaml").write_text("limits: {max_body_bytes: 2000000}")
    with Supervisor(config(repository, client_shared_memory=allowed)):
        flags = told(repository)["flags"]
    assert flags.get("allow-client-shm") == ("true" if known and allowed else None)
    assert flags.get("http-max-input-size") == ("2000000" if known else None)


def test_what_tritonserver_is_given_follows_the_profile(
    repository: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTIONS", "  --http-max-input-size <integer>")
    models = Path(shutil.copytree(Path(__file__).parents[2] / "model_repository", repository.parent / "whole"))
    profile = Profile("mine", {"thinker": {"limits": {"max_body_bytes": 2000000}}})
    with Supervisor(config(models, model=str(tiny_checkpoint), profile=profile)):
        flags = told(models)["flags"]
        laid_out = Path(flags["model-repository"]) / "thinker" / "1" / "stage.yaml"
        assert "max_body_bytes: 2000000" in laid_out.read_text()
    assert flags["http-max-input-size"] == "2000000"
    assert not laid_out.exists()


@pytest.mark.parametrize("switch", [True, False])
@pytest.mark.parametrize("version", ["2.51.0", "2.99.0"])
def test_the_stall_guard_can_be_switched_off_and_warns_of_a_version_with_which_it_was_not_tried(
    repository: Path, capsys: pytest.CaptureFixture[str], switch: bool, version: str
) -> None:
    with Supervisor(config(repository, environment={"VERSION": version}, stall_guard=switch)):
        assert ("stall_guard" in told(repository)["preload"]) is switch
        assert "bounds" in told(repository)["preload"]
    assert ("this is 2.99; if the server ends" in capsys.readouterr().err) is (switch and version == "2.99.0")


def test_the_failing_model_and_its_reason_are_named(repository: Path) -> None:
    with pytest.raises(ServerNotReady) as caught, Supervisor(config(repository, environment={"BEHAVIOUR": "fail"})):
        pass
    text = str(caught.value)
    assert "ended with code 1: model thinker cannot be loaded: Internal: SettingsError: stage.yaml: engine.x" in text
    assert "At:" not in text
    assert "server.log" in text


def test_a_server_that_finds_its_last_port_taken_was_never_ready(repository: Path) -> None:
    with (
        pytest.raises(ServerNotReady, match="failed to start Metrics service: Unavailable - Socket already in use"),
        Supervisor(config(repository, environment={"BEHAVIOUR": "no metrics"})),
    ):
        pass


def test_free_ports_are_not_those_that_outgoing_connections_get() -> None:
    outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    chosen = [choose_ports("127.0.0.1", {"http": 0, "grpc": 0}) for _ in range(20)]
    ports = [port for ports in chosen for port in ports.values()]
    assert all(20000 <= port < max(outgoing, 20001) for port in ports)
    assert len(set(ports)) > 20


@pytest.mark.usefixtures("no_forced_end")
def test_a_server_that_never_gets_ready_is_stopped(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Supervisor(config(repository, environment={"BEHAVIOUR": "loading"}, ready_timeout_s=0.1))
    # Not before it can be stopped in order.
    look = "triton_omni.supervisor.start.StartReport.look"
    monkeypatch.setattr(look, lambda _: wait_for(lambda: listens(server.http_url)))
    with pytest.raises(ServerNotReady, match=r"not ready after 0\.1 s"), server:
        pass
    assert server.exit_code == 0


def listens(url: str) -> bool:
    host, _, port = url.partition(":")
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection((host, int(port))):
        return True
    return False


def test_a_deaf_server_is_ended_after_its_exit_timeout(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton_omni.supervisor.server_run.KILL_AFTER_S", 0.5)
    with Supervisor(config(repository, environment={"BEHAVIOUR": "deaf"}, exit_timeout_s=0)) as server:
        assert server.stop() >= 0.5
        assert server.exit_code == 128 + signal.SIGKILL


def test_a_server_that_goes_on_without_a_stage_is_not_waited_for(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("triton_omni.supervisor.server_run._ALONE_S", 0.5)
    with Supervisor(config(repository, environment={"BEHAVIOUR": "deaf"}, exit_timeout_s=FOREVER_S)) as server:
        assert server.stop() >= 0.5
        assert server.exit_code == 128 + signal.SIGKILL
    assert "clients that hold a stream open are cut off" in capsys.readouterr().err


def test_a_server_that_still_has_a_stage_gets_its_whole_exit_timeout(
    repository: Path, stage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton_omni.supervisor.server_run._ALONE_S", 0.1)
    monkeypatch.setattr("triton_omni.supervisor.server_run.KILL_AFTER_S", 0.5)
    environment = {"BEHAVIOUR": "deaf", "STAGE": str(stage)}
    with Supervisor(config(repository, environment=environment, exit_timeout_s=1)) as server:
        assert server.stop() >= 1.5


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Path]:
    """The file in which a server's stage writes its process id; the stage is ended if the server left it."""
    file = tmp_path / "stage.pid"
    yield file
    if file.exists() and is_running(int(file.read_text())):
        os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("behaviour", ["serve", "deaf"])
def test_no_stage_is_left_of_a_server_that_was_stopped(
    repository: Path, stage: Path, behaviour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton_omni.supervisor.server_run.KILL_AFTER_S", 0.5)
    environment = {"BEHAVIOUR": behaviour, "STAGE": str(stage)}
    with Supervisor(config(repository, environment=environment, exit_timeout_s=0)) as server:
        assert is_running(int(stage.read_text()))
        server.stop()
        assert not is_running(int(stage.read_text()))


def test_a_signal_while_a_server_is_stopped_is_acted_on_after_the_stop(
    repository: Path, stage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton_omni.supervisor.server_run.KILL_AFTER_S", 0.5)
    terminate, coming, exit_codes = subprocess.Popen.terminate, [signal.SIGTERM, signal.SIGINT], []

    def terminated(process: subprocess.Popen[bytes]) -> None:
        terminate(process)
        numbers, coming[:] = coming[:], []
        for number in numbers:
            signal.raise_signal(number)

    def interrupt(number: int) -> None:
        exit_codes.append(server.exit_code)
        raise SystemExit(128 + number)

    monkeypatch.setattr(subprocess.Popen, "terminate", terminated)
    server = Supervisor(config(repository, environment={"BEHAVIOUR": "deaf", "STAGE": str(stage)}, exit_timeout_s=0))
    with server, on_signals(interrupt):
        with pytest.raises(SystemExit, match=f"^{128 + signal.SIGTERM}$"):
            server.stop()
        assert exit_codes == [128 + signal.SIGKILL]
        assert not is_running(int(stage.read_text()))


@pytest.mark.usefixtures("no_forced_end")
def test_a_server_can_be_stopped_in_another_thread(repository: Path) -> None:
    with Supervisor(config(repository)) as server:
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        stopping.join()
        assert server.exit_code == 0


def test_no_stage_is_left_of_a_server_that_was_killed(repository: Path, stage: Path) -> None:
    with Supervisor(config(repository, environment={"STAGE": str(stage)})) as server:
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(ServerError, match="ended with code 137"):
            server.run()
        assert not is_running(int(stage.read_text()))


def test_a_server_that_lives_but_listens_no_more_is_given_up(
    repository: Path, stage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton_omni.supervisor.probe._LOOK_EVERY_S", 0.05)
    monkeypatch.setattr("triton_omni.supervisor.probe._HUNG_UP_S", 0.3)
    with Supervisor(config(repository, environment={"STAGE": str(stage)})) as server:
        until = time.monotonic() + 0.6
        while time.monotonic() < until:
            server.check()
        os.kill(server.pid, signal.SIGUSR1)
        with pytest.raises(ServerError, match="the server's process lives, but has closed its HTTP port"):
            server.run()
        server.stop()
    assert not is_running(int(stage.read_text()))


def test_no_stage_is_left_of_a_server_that_never_got_ready(repository: Path, stage: Path) -> None:
    environment = {"BEHAVIOUR": "fail", "STAGE": str(stage)}
    with pytest.raises(ServerNotReady), Supervisor(config(repository, environment=environment)):
        pass
    assert not is_running(int(stage.read_text()))


def test_the_shared_memory_of_a_server_goes_with_it(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(leftovers, "_SHARED_MEMORY", shared)
    monkeypatch.setattr(server_folder, "_SHARED_MEMORY", shared)
    with Supervisor(config(repository)) as server:
        prefix = told(repository)["flags"]["backend-config"].removeprefix("python,shm-region-prefix-name=")
        others = {"triton_omni_another_servers", "triton_python_backend_shm_region_1"}
        for name in (f"{prefix}1", f"{prefix}2", *others):
            (shared / name).touch()
        create_table(server_folder.ledger_name(server.pid))
        os.kill(server.pid, signal.SIGKILL)
        server.stop()
    assert {file.name for file in shared.iterdir()} == others


def test_the_regions_of_servers_that_were_killed_with_their_supervisors_go_at_the_next_start(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(leftovers, "_SHARED_MEMORY", shared)
    with subprocess.Popen(["sleep", "600"]) as killed:
        stale, mapped = (leftovers.new_region_prefix(killed.pid) + "1" for _ in range(2))
        killed.kill()
    living = leftovers.new_region_prefix(os.getpid()) + "1"
    foreign = stale.replace(f"-{server_folder.process_namespace()}-", "-1-")
    for name in (stale, mapped, living, foreign, "something_else"):
        (shared / name).write_bytes(bytes(4096))
    with (shared / mapped).open("r+b") as file, mmap.mmap(file.fileno(), 4096), Supervisor(config(repository)):
        assert {file.name for file in shared.iterdir()} == {mapped, living, foreign, "something_else"}


@contextlib.contextmanager
def one_stage(server: Supervisor) -> Iterator[subprocess.Popen[bytes]]:
    """A stage of a server that was started, beside one that lives as long as the test; it can be killed."""
    name = server_folder.ledger_name(server.pid)
    table = server_folder.table_path(name)
    create_table(name)
    with subprocess.Popen(["sleep", "600"]) as stage:
        board = StageBoard(name)
        board.set_word(EPOCH, 1, "talker")
        for model, pid in (("talker", stage.pid), ("thinker", os.getpid())):  # the thinker is left
            board.set_word(PID, pid, model)
            board.set_word(BEAT, time.monotonic_ns(), model)
        try:
            server.wait_ready()
            yield stage
        finally:
            server.stop()
            stage.kill()
    assert not table.exists()


@pytest.fixture
def mortal(repository: Path) -> Iterator[tuple[Supervisor, subprocess.Popen[bytes]]]:
    """A server that refuses to load anything, and its stage."""
    policy = RestartPolicy(attempts=1)
    server = Supervisor(config(repository, environment={"BEHAVIOUR": "deaf"}, restart=policy, exit_timeout_s=FOREVER_S))
    server.start()
    with one_stage(server) as stage:
        yield server, stage


def test_a_stage_that_does_not_stay_ends_the_server_with_one_sentence(
    mortal: tuple[Supervisor, subprocess.Popen[bytes]],
) -> None:
    server, stage = mortal
    stage.kill()
    with pytest.raises(
        ServerError, match=r"talker does not stay \(starts in 600 s: 1\): .*could not be loaded"
    ) as caught:
        server.run()
    assert "\n" not in str(caught.value)


def test_a_watch_that_cannot_begin_is_not_taken_for_a_server_without_stages(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: StageRestarter) -> None:
        raise FileNotFoundError("/proc/1")

    monkeypatch.setattr(StageRestarter, "start", fail)
    server = Supervisor(config(repository))
    server.start()
    with pytest.raises(FileNotFoundError, match="/proc/1"), one_stage(server):
        pass


def run_until_replaced(server: Supervisor, pid: int) -> None:
    """Run it until another process has taken the place of this one, and is ready."""

    def watch() -> None:
        wait_for(lambda: server.pid != pid and server._running().is_ready())
        server.request_stop()

    watching = threading.Thread(target=watch)
    watching.start()
    server.run()
    watching.join()


@pytest.mark.parametrize("version", ["2.66.0", "2.71.0", "unknown"])
def test_where_errors_wait_a_death_ends_the_server_and_another_takes_its_place(
    repository: Path, version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Supervisor(config(repository, environment={"BEHAVIOUR": "deaf", "VERSION": version}))
    server.start()
    with one_stage(server) as stage:
        ended, urls = server._running(), (server.http_url, server.grpc_url, server.metrics_url)
        stage.kill()
        run_until_replaced(server, ended.process.pid)
        assert ended.exit_code == 128 + signal.SIGKILL
        assert urls == (server.http_url, server.grpc_url, server.metrics_url)
        assert (server.exit_code, server.deaths) == (None, 1)
        log = repository.parent / "server.log"
        wait_for(lambda: log.read_text().count('"model"') == 2)
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line.startswith(("talker", "the server"))] == [
        "talker: its process ended",
        "the server: started again",
    ]


def test_a_server_that_cannot_be_started_again_is_given_up_in_one_sentence(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = RestartPolicy(attempts=2, first_wait_s=0.1, whole_server=True)
    server = Supervisor(config(repository, environment={"BEHAVIOUR": "deaf"}, restart=policy))
    server.start()
    with one_stage(server) as stage:
        binary = repository.parent / "bin" / "tritonserver"
        binary.write_text(binary.read_text().replace('if behaviour == "fail":', "if True:"))
        stage.kill()
        said = r"the server does not stay \(starts in 600 s: 2\): the server ended with code 1: model thinker cannot be"
        with pytest.raises(ServerError, match=said) as caught:
            server.run()
    assert "\n" not in str(caught.value)


def test_a_stop_ends_the_wait_before_a_server_is_started_again(repository: Path) -> None:
    policy = RestartPolicy(attempts=9, first_wait_s=600.0, whole_server=True)
    server = Supervisor(config(repository, environment={"BEHAVIOUR": "deaf"}, restart=policy, exit_timeout_s=FOREVER_S))
    server.start()
    with one_stage(server) as stage:
        server._starts.count_start()
        stage.kill()
        running = threading.Thread(target=server.run)
        running.start()
        wait_for(lambda: server.exit_code is not None)
        server.request_stop()
        running.join(IN_TIME_S)
        assert not running.is_alive()
        assert server.drain()
        server.stop()


def test_a_server_s_guard_that_was_killed_is_replaced(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Supervisor(config(repository)) as server:
        guard = server._running()._guard
        killed = guard._process.pid
        server.check()
        assert guard._process.pid == killed
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: not is_running(killed))
        server.check()
        assert guard._process.pid != killed
        assert is_running(guard._process.pid)
    assert capsys.readouterr().err.endswith("\nwarning: the guard's process was gone; another was started\n")


def test_a_server_that_waits_for_what_a_dead_stage_held_is_not_waited_for(
    mortal: tuple[Supervisor, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton_omni.supervisor.server_run._ALONE_S", 0.3)
    monkeypatch.setattr("triton_omni.supervisor.server_run.has_followers", lambda process: True)
    server, killed = mortal
    killed.kill()
    with contextlib.suppress(ServerError):
        server.run()
    server.stop()


@dataclass
class Board:
    """The stages' number of open sessions at a stop."""

    open: int = 0

    def set_word(self, declared: Field, value: int) -> None:
        pass

    def open_sessions(self) -> int:
        return self.open


@pytest.mark.parametrize("sessions", [0, 1])
def test_a_stage_that_is_kept_after_the_last_session_is_not_waited_for(
    repository: Path, stage: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sessions: int
) -> None:
    """Triton keeps it for a client that called it by name and holds the stream open."""
    monkeypatch.setattr("triton_omni.supervisor.server_run._LEAVE_WITHIN_S", 0.3)
    monkeypatch.setattr("triton_omni.supervisor.server_run.END_WITHIN_S", 0.1)
    monkeypatch.setattr("triton_omni.supervisor.server_run.KILL_AFTER_S", 0.5)
    monkeypatch.setattr(ModelControl, "unload", lambda _, model: None)
    environment = {"BEHAVIOUR": "deaf", "STAGE": str(stage)}
    with Supervisor(config(repository, environment=environment, exit_timeout_s=1 if sessions else FOREVER_S)) as server:
        monkeypatch.setattr(server._running(), "_board", Board(sessions))
        assert server.stop() >= 0.3
        assert not is_running(int(stage.read_text()))
    assert ("nothing is left to do" in capsys.readouterr().err) == (not sessions)


@pytest.mark.usefixtures("no_forced_end")
def test_models_leave_before_the_server_is_told_to_stop(
    repository: Path, stage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server then loses nothing with a client that holds a stream open."""
    happened: list[str] = []
    with Supervisor(config(repository, environment={"STAGE": str(stage)})) as server:
        process = int(stage.read_text())

        def unload(_: ModelControl, model: str) -> None:
            happened.append(model)
            if model == "thinker":
                os.kill(process, signal.SIGKILL)

        def terminate(popen: subprocess.Popen[bytes]) -> None:
            happened.append("stage runs" if is_running(process) else "stage has left")
            popen.send_signal(signal.SIGTERM)

        monkeypatch.setattr(ModelControl, "unload", unload)
        monkeypatch.setattr(subprocess.Popen, "terminate", terminate)
        monkeypatch.setattr(server._running(), "_board", Board())
        server.stop()
    assert happened == ["qwen2_5_omni_unary", "token2wav", "talker", "thinker", "stage has left"]
    assert server.exit_code == 0


@pytest.mark.parametrize("service", ["http", "grpc", "metrics"])
def test_a_taken_port_is_refused_by_service_and_number_before_the_start(repository: Path, service: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = Supervisor(config(repository, **{f"{service}_port": port}))
        with pytest.raises(ServerError, match=rf"{service} cannot listen on 127.0.0.1:{port} .*--{service}-port"):
            server.start()
        with pytest.raises(ServerError, match="not started"):
            _ = server.pid


def test_two_services_cannot_share_a_port() -> None:
    free = choose_ports("127.0.0.1", {"http": 0})["http"]
    with pytest.raises(ServerError, match="grpc cannot listen"):
        choose_ports("127.0.0.1", {"http": free, "grpc": free})


def test_a_host_that_is_not_here_is_refused() -> None:
    with pytest.raises(
        ServerError, match=r"http cannot listen on 192\.0\.2\.1:0 .*: choose an address of this machine for --host"
    ):
        choose_ports("192.0.2.1", {"http": 0})


def test_a_server_that_cannot_be_guarded_is_ended_before_the_start_fails(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, popen = [], subprocess.Popen

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        if len(started) == 2:  # it was asked for its options, and started
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    server = Supervisor(config(repository))
    with pytest.raises(ServerError, match=r"^a process cannot be started: Resource temporarily unavailable$"):
        server.start()
    assert started[1].poll() == -signal.SIGKILL
    with pytest.raises(ServerError, match="not started"):
        print(server.pid)


def test_a_server_is_started_once(repository: Path) -> None:
    with Supervisor(config(repository)) as server, pytest.raises(ServerError, match="already started"):
        server.start()


def test_nothing_is_known_before_the_start(repository: Path) -> None:
    server = Supervisor(config(repository))
    assert server.stop() == 0.0
    with pytest.raises(ServerError, match="not started"):
        _ = server.pid


def test_a_missing_repository_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"nowhere is no folder"):
        Supervisor(ServerConfig(tmp_path / "nowhere")).start()


@pytest.fixture
def whole_checkpoint(repository: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command looks at the checkpoint's files before it starts a server."""
    del repository  # which names another
    monkeypatch.setenv("OMNI_MODEL", str(tiny_checkpoint))


FREE_PORTS = ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
MODULE = [sys.executable, "-m", "triton_omni.supervisor.serve"]


def after_the_start(said: str) -> str:
    """Return a command's output without the steps of its start."""
    return "".join(line for line in said.splitlines(keepends=True) if not line.startswith("starting: "))


def command(repository: Path) -> subprocess.Popen[str]:
    """The command in a process of its own, its log in a file."""
    arguments = ["--model-repository", str(repository), "--log-file", str(repository.parent / "server.log")]
    return subprocess.Popen(
        [*MODULE, *arguments, *FREE_PORTS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.usefixtures("whole_checkpoint", "hang_up_ends")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_command_prints_ready_and_ends_as_the_signal_says(
    repository: Path, stage: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGE", str(stage))
    with command(repository) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert [part.partition("=")[0] for part in line.split()] == ["READY", "http", "grpc", "metrics"]
        process.send_signal(number)
        output, said = process.communicate(timeout=IN_TIME_S)
        assert (output, after_the_start(said)) == ("", "")
        assert process.returncode == 128 + number
    assert not is_running(int(stage.read_text()))


@pytest.mark.usefixtures("whole_checkpoint")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_models_load_ends_the_command_without_a_word(
    repository: Path, stage: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEHAVIOUR", "loading")
    monkeypatch.setenv("STAGE", str(stage))
    with command(repository) as process:
        wait_for(stage.exists)
        # One may come while another is dealt with, at any point of it.
        for _ in range(200):
            process.send_signal(number)
        output, said = process.communicate(timeout=IN_TIME_S)
        assert (output, after_the_start(said)) == ("", "")
        assert process.returncode == 128 + number
    assert not is_running(int(stage.read_text()))


def test_a_signal_while_a_checkpoint_is_fetched_ends_the_command_at_once(repository: Path, tmp_path: Path) -> None:
    code = """import sys, time, triton_omni.supervisor.serve as supervisor
supervisor.model_folder = lambda source: (print("fetching", flush=True), time.sleep(600))
supervisor.main(sys.argv[1:])"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, "--model-repository", str(repository)], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "fetching\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(IN_TIME_S) == 130


def server_of(supervisor: int) -> int:
    """Its first child; the second is the server's guard."""
    return children(supervisor)[0]


@pytest.mark.usefixtures("whole_checkpoint")
def test_the_command_tells_why_its_server_ended(repository: Path, stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGE", str(stage))
    with command(repository) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(server_of(process.pid), signal.SIGKILL)
        _, said = process.communicate(timeout=IN_TIME_S)
        assert process.returncode == 1
    assert said.startswith("starting: tritonserver is process ")
    assert after_the_start(said).startswith("error: the server ended with code 137: it was killed (SIGKILL)")
    assert after_the_start(said).count("\n") == 1


def test_the_command_says_why_in_one_line(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model-repository", str(repository / "nowhere")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("port", ["70000", "-1", "x"])
def test_a_port_out_of_range_is_refused(repository: Path, port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model-repository", str(repository), f"--http-port={port}"])
    assert capsys.readouterr().err == f"error: argument --http-port: {port} is not in 0..65535\n"


def test_a_stop_before_readiness_ends_the_wait(repository: Path) -> None:
    server = Supervisor(config(repository, environment={"BEHAVIOUR": "loading"}))
    server.request_stop()
    with pytest.raises(ServerNotReady, match="stopped before"), server:
        pass


def test_a_stop_during_the_first_reply_ends_the_wait(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Supervisor(config(repository, warm_up=True))

    def first_reply(_host: str, _port: int, given_up: Callable[[], bool]) -> None:
        assert not given_up()
        server.request_stop()
        assert given_up()

    monkeypatch.setattr(serve, "warm_up", first_reply)
    server.start()
    with pytest.raises(ServerNotReady, match="stopped before"), one_stage(server):
        pass


def test_triton_home_without_a_server_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"build\.sh setup"):
        find_triton({"TRITON_HOME": str(tmp_path)})


def test_an_unpacked_server_brings_its_backends_and_libraries(tmp_path: Path) -> None:
    binary = tmp_path / "pytriton" / "tritonserver" / "bin" / "tritonserver"
    binary.parent.mkdir(parents=True)
    binary.touch()
    install = find_triton({"TRITON_HOME": str(tmp_path)})
    assert install.binary == binary
    assert install.backend_directory == binary.parents[1] / "backends"
    assert install.library_folders[0] == tmp_path / "nvidia_pytriton.libs"


@pytest.mark.parametrize(
    ("chosen", "seen"), [(None, 2), ("", 0), ("1", 1), ("0,1", 2), ("-1", 0), ("0,1,2", 2), ("1,-1,0", 1)]
)
def test_gpus_are_those_present_and_chosen(tmp_path: Path, chosen: str | None, seen: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    environment = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert visible_gpus(environment, tmp_path) == seen


def test_the_pool_holds_two_of_the_largest_messages_a_session_on_both_links() -> None:
    thinker = ThinkerSettings(max_sessions=4, rows_per_message=128)
    talker = TalkerSettings(max_codes=100)
    margin = pool_bytes(thinker, talker, 0, 2) - 4 * 2 * 100 * 4
    assert margin > 0
    assert pool_bytes(thinker, talker, 3584, 2) == 4 * 2 * (128 * 3584 * 2 + 100 * 4) + margin


def test_the_pool_follows_the_repository_and_the_checkpoint(repository: Path) -> None:
    for stage in ("thinker", "talker"):
        (repository / stage / "1").mkdir(parents=True)
    (repository / "thinker" / "1" / "stage.yaml").write_text("{max_sessions: 3, dtype: float32}")
    (repository / "talker" / "1" / "stage.yaml").write_text("")
    model = Path(os.environ["OMNI_MODEL"])
    assert memory_pool_bytes(repository, model) == pool_bytes(
        ThinkerSettings(max_sessions=3), TalkerSettings(), hidden_size=64, dtype_bytes=4
    )
    (model / "config.json").write_text("{}")
    with pytest.raises(ServerError, match="hidden_size"):
        memory_pool_bytes(repository, model)
    (repository / "thinker" / "1" / "stage.yaml").write_text("{max_session: 3}")
    with pytest.raises(ServerError, match="max_session"):
        memory_pool_bytes(repository, model)


def test_a_checkpoint_folder_needs_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"no config\.json"):
        model_folder(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert model_folder(str(tmp_path)) == tmp_path.resolve()


def test_random_weights_are_asked_for_by_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def made(size: str, **_: object) -> Path:
        if size == "7b":
            raise OSError(28, "No space left on device")
        asked.append(size)
        return tmp_path

    monkeypatch.setattr("triton_omni.checkpoint.synthetic.ensure_checkpoint", made)
    assert [model_folder(f"random:{name}") for name in ("3b", "tiny", "7b-awq")] == [tmp_path] * 3
    assert asked == ["3b", "tiny", "7b-awq"]
    with pytest.raises(ModelFolderError, match=r"random:7b cannot be made: .*No space left on device"):
        model_folder("random:7b")
    assert print_model_folder(["random:70b"]) == 1
    told = capsys.readouterr().err
    assert (
        "random:70b: there are random weights of the sizes tiny, 3b, 7b, each also with -awq or -gptq after it" in told
    )


@pytest.mark.parametrize("source", ["", None])
def test_the_default_is_the_trained_checkpoint_of_the_repository(source: str | None) -> None:
    folder = model_folder(source)
    assert folder == Path(__file__).resolve().parents[2] / "training" / "mini"
    check_files(folder)


def test_without_the_repository_a_checkpoint_must_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("triton_omni.supervisor.model_folder.MINI", tmp_path)
    assert print_model_folder([]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"OMNI_MODEL names no checkpoint, and the default one, {tmp_path}, is not there")
    assert "Set OMNI_MODEL to a folder, to a Hugging Face id, or to random:tiny" in told


def test_a_checkpoint_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelFolderError, match=r"model\.safetensors is no folder"):
        model_folder(str(tmp_path / "model.safetensors"))


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "tiny"))


def test_a_whole_checkpoint_passes(checkpoint: Path) -> None:
    check_files(checkpoint)


@pytest.mark.parametrize(
    "pattern", ["model-00002-*.safetensors", "spk_dict.pt", "tokenizer.json", "preprocessor_config.json"]
)
def test_a_checkpoint_without_one_of_its_files_is_refused_by_name(checkpoint: Path, pattern: str) -> None:
    (name,) = (file.name for file in checkpoint.glob(pattern))
    (checkpoint / name).write_bytes(b"")
    with pytest.raises(ModelFolderError, match=rf"tiny (is no|cannot be) .*{name}"):
        check_files(checkpoint)
    (checkpoint / name).unlink()
    with pytest.raises(ModelFolderError, match=rf"tiny is no whole checkpoint: it lacks {name}$"):
        check_files(checkpoint)


def test_a_checkpoint_without_weights_is_refused(checkpoint: Path) -> None:
    shards = sorted(checkpoint.glob("model*.safetensors"))
    for file in shards:
        file.unlink()
    with pytest.raises(ModelFolderError, match=rf"lacks {shards[0].name}, .* and {len(shards) - 5} more$"):
        check_files(checkpoint)
    (checkpoint / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelFolderError, match=r"lacks model\.safetensors$"):
        check_files(checkpoint)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"model_type": "qwen2"}', "config.json.model_type: expected 'qwen2_5_omni', found 'qwen2'"),
        ("{}", "config.json.model_type: expected 'qwen2_5_omni', found None"),
        ('{"model_type": "qwen2_5_omni"}', "config.json.token2wav_config: is missing"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(checkpoint: Path, text: str, reason: str) -> None:
    (checkpoint / "config.json").write_text(text)
    with pytest.raises(ModelFolderError) as refused:
        check_files(checkpoint)
    assert str(refused.value) == f"{checkpoint} is no checkpoint that can be served: {reason}"


def test_the_command_refuses_a_damaged_checkpoint_before_it_starts_a_server(
    repository: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "spk_dict.pt").unlink()
    assert main(["--model-repository", str(repository), "--model", str(checkpoint)]) == 1
    assert capsys.readouterr().err == f"error: {checkpoint} is no whole checkpoint: it lacks spk_dict.pt\n"


def test_a_hub_id_is_fetched_with_weights_in_safetensors_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(repo: str, allow_patterns: list[str]) -> str:
        asked.append((repo, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert model_folder("Qwen/Qwen2.5-Omni-7B") == tmp_path
    assert asked[0][0] == "Qwen/Qwen2.5-Omni-7B"
    assert not any(pattern.endswith((".bin", ".pth")) for pattern in asked[0][1])


def test_a_failed_fetch_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def snapshot_download(repo: str, allow_patterns: list[str]) -> str:
        raise OSError("no network\nsecond line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert print_model_folder(["owner/name"]) == 1
    assert capsys.readouterr().err == "owner/name cannot be fetched from Hugging Face: no network\n"


@pytest.mark.parametrize("source", ["not an id", "./nowhere", "/nowhere", "~/nowhere", "models/new/one"])
def test_neither_folder_nor_id_is_refused(source: str) -> None:
    with pytest.raises(ModelFolderError, match=f"'{source}' is neither a folder nor"):
        model_folder(source)
