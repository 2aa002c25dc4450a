# SPDX-License-Identifier: Apache-2.0
"""The MPS daemon of a server against stand-ins for NVIDIA's program and tritonserver: start, variables, every end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from processes import is_running
from triton_omni.supervisor import mps
from triton_omni.supervisor.machine import ServerError, visible_gpus
from triton_omni.supervisor.mps import mps_daemon
from triton_omni.supervisor.options import ServerConfig
from triton_omni.supervisor.serve import Supervisor, main
from waiting import IN_TIME_S, wait_for

# Speaks as nvidia-cuda-mps-control does: `-f` is the daemon, without arguments it hands one command to the daemon of
# its CUDA_MPS_PIPE_DIRECTORY. Each event is appended to the file in MPS_RECORD.
CONTROL = """#!/bin/sh
pipe=$CUDA_MPS_PIPE_DIRECTORY
if [ "$1" = -f ]; then
    case $MPS_BEHAVIOUR in
        fail) echo "starting"; echo "no permission for this device"; exit 3 ;;
        mute) exec sleep 600 ;;
    esac
    [ -d "$CUDA_MPS_LOG_DIRECTORY" ] || exit 4
    echo "start $$ $pipe gpus=${CUDA_VISIBLE_DEVICES-all}" >>"$MPS_RECORD"
    trap '' TERM INT
    sleep 600 & # stands for the MPS server
    echo "server $!" >>"$MPS_RECORD"
    echo listening >"$pipe/control"
    while [ ! -e "$pipe/quit" ] || [ "$MPS_BEHAVIOUR" = deaf ]; do sleep 0.02; done
    kill $!
    echo end >>"$MPS_RECORD"
    exit 0
fi
[ -e "$pipe/control" ] || exit 1
read -r command
[ "$command" != quit ] || { echo quit >>"$MPS_RECORD"; : >"$pipe/quit"; }
"""

# The part of tritonserver that its supervisor needs; it keeps its MPS variables, and says when it ends in order.
SERVER = """#!{python}
import http.server, json, os, signal, sys, threading
flags = dict(argument[2:].split("=", 1) for argument in sys.argv[1:])
with open(os.environ["MPS_RECORD"], "a") as file:
    print("triton", json.dumps({{k: v for k, v in os.environ.items() if k.startswith("CUDA_MPS_")}}), file=file)
if os.environ.get("BEHAVIOUR") == "fail":
    sys.exit(1)
def end(*_):
    with open(os.environ["MPS_RECORD"], "a") as file:
        print("triton-end", file=file)
    os._exit(0)
signal.signal(signal.SIGTERM, end)
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
def listen(service):
    return http.server.HTTPServer((flags[service + "-address"], int(flags[service + "-port"])), Ready)
threading.Thread(target=listen("metrics").serve_forever, daemon=True).start()
listen("http").serve_forever()
"""


class Record:
    """Actions of the stand-ins."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def events(self) -> list[str]:
        """First words, in order."""
        return [line.split()[0] for line in self._lines()]

    def of(self, event: str) -> str:
        """Return the text of the event."""
        return next(line for line in self._lines() if line.split()[0] == event).partition(" ")[2]

    def daemon(self) -> int:
        return int(self.of("start").split()[0])

    def folder(self) -> Path:
        return Path(self.of("start").split()[1]).parent

    def nothing_is_left(self) -> bool:
        pids = [self.daemon(), int(self.of("server"))]
        return not any(is_running(pid) for pid in pids) and not self.folder().exists()

    def _lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Record]:
    """A GPU, and both stand-ins first on PATH."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name, text in {
        "nvidia-cuda-mps-control": CONTROL,
        "tritonserver": SERVER.format(python=sys.executable),
    }.items():
        (binaries / name).write_text(text)
        (binaries / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(binaries), prepend=os.pathsep)
    for name in ("TRITON_HOME", "OMNI_MPS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("MPS_RECORD", str(tmp_path / "record"))
    monkeypatch.setattr(mps, "visible_gpus", lambda _: 1)
    # Neither is given up because it is slow.
    for limit in ("mps._ANSWERS_WITHIN_S", "mps._ENDS_WITHIN_S", "server_run._ALONE_S"):
        monkeypatch.setattr(f"triton_omni.supervisor.{limit}", IN_TIME_S)
    found = Record(tmp_path / "record")
    yield found
    for event in {"start", "server"} & set(found.events()):  # of a test that failed
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(found.of(event).split()[0]), signal.SIGKILL)


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    models = tmp_path / "models"
    models.mkdir()
    return ServerConfig(models, str(checkpoint), log_path=tmp_path / "server.log", mps=True)


def test_the_daemon_has_folders_of_its_own_with_a_short_path(record: Record) -> None:
    with mps_daemon(os.environ) as (first, _), mps_daemon(os.environ) as (second, _):
        assert set(first) == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}
        assert len({*first.values(), *second.values()}) == 4
        assert all(Path(folder).is_dir() for folder in first.values())
        assert len(first["CUDA_MPS_PIPE_DIRECTORY"]) < 40
    assert not any(Path(folder).exists() for folder in first.values())


def test_another_daemon_of_the_machine_is_left_alone(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    with mps_daemon(os.environ) as (another, _):
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", another["CUDA_MPS_PIPE_DIRECTORY"])
        with mps_daemon(os.environ) as (own, _):
            assert own["CUDA_MPS_PIPE_DIRECTORY"] != another["CUDA_MPS_PIPE_DIRECTORY"]
        assert record.events().count("quit") == 1
        assert is_running(record.daemon())


@pytest.mark.parametrize(("chosen", "given"), [("1", "all"), ("GPU-0a1b", "GPU-0a1b")])
def test_gpus_chosen_by_index_are_left_to_the_clients(
    record: Record, monkeypatch: pytest.MonkeyPatch, chosen: str, given: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    with mps_daemon(os.environ):
        assert record.of("start").endswith(f"gpus={given}")


def test_a_daemon_that_does_not_quit_is_killed_with_its_servers(
    record: Record, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPS_BEHAVIOUR", "deaf")
    send = mps._send_command

    def send_and_wait_little(program: str, env: Mapping[str, str], command: str) -> bool:
        took = send(program, env, command)
        if command == "quit":
            monkeypatch.setattr(mps, "_ENDS_WITHIN_S", 0.3)
        return took

    monkeypatch.setattr(mps, "_send_command", send_and_wait_little)
    with mps_daemon(os.environ):
        assert is_running(record.daemon())
    assert record.events()[-1] == "quit"
    assert record.nothing_is_left()
    said = "warning: nvidia-cuda-mps-control did not quit within 0.3 s and is ended by force\n"
    assert capsys.readouterr().err == said


def test_a_daemon_that_has_died_is_no_error_at_the_end(record: Record) -> None:
    with mps_daemon(os.environ):
        os.kill(record.daemon(), signal.SIGKILL)
        wait_for(lambda: not is_running(record.daemon()))
    assert record.nothing_is_left()


def test_a_daemon_that_fails_to_start_says_why(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPS_BEHAVIOUR", "fail")
    with pytest.raises(ServerError) as caught, mps_daemon(os.environ):
        pass
    assert str(caught.value) == "nvidia-cuda-mps-control ended with code 3: no permission for this device"
    assert not record.events()


def test_a_daemon_that_never_answers_is_an_error(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPS_BEHAVIOUR", "mute")
    monkeypatch.setattr(mps, "_ANSWERS_WITHIN_S", 0.2)
    with pytest.raises(ServerError, match=r"did not answer within 0\.2 s"), mps_daemon(os.environ):
        pass


def test_a_missing_program_is_one_sentence_and_no_server(record: Record, config: ServerConfig, tmp_path: Path) -> None:
    (tmp_path / "bin" / "nvidia-cuda-mps-control").unlink()
    with pytest.raises(ServerError, match="there is no nvidia-cuda-mps-control on PATH: it comes with NVIDIA's driver"):
        Supervisor(config).start()
    assert not record.events()


def test_mps_without_a_gpu_is_refused(record: Record, config: ServerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "visible_gpus", visible_gpus)
    with pytest.raises(ServerError, match="this process sees no NVIDIA GPU"):
        Supervisor(config).start()
    assert not record.events()


def test_the_server_is_a_client_of_the_daemon_and_ends_first(record: Record, config: ServerConfig) -> None:
    with Supervisor(config):
        folder = record.folder()
        assert json.loads(record.of("triton")) == {
            "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe",
            "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log",
        }
    assert record.events() == ["start", "server", "triton", "triton-end", "quit", "end"]
    assert record.nothing_is_left()


def test_a_server_without_mps_starts_no_daemon(record: Record, config: ServerConfig) -> None:
    with Supervisor(ServerConfig(config.model_repository, config.model, log_path=config.log_path)):
        pass
    assert record.events() == ["triton", "triton-end"]


def test_the_daemon_quits_when_the_server_was_killed(record: Record, config: ServerConfig) -> None:
    with Supervisor(config) as server:
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(ServerError, match="ended with code 137"):
            server.run()
    assert record.events() == ["start", "server", "triton", "quit", "end"]
    assert record.nothing_is_left()


def test_the_daemon_quits_when_the_server_fails_to_load(
    record: Record, config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEHAVIOUR", "fail")
    with pytest.raises(ServerError, match="ended with code 1"), Supervisor(config):
        pass
    assert record.events() == ["start", "server", "triton", "quit", "end"]
    assert record.nothing_is_left()


def test_the_daemon_quits_when_the_server_cannot_be_run(record: Record, config: ServerConfig, tmp_path: Path) -> None:
    (tmp_path / "bin" / "tritonserver").write_text("#!/nowhere\n")
    with pytest.raises(ServerError, match="tritonserver cannot be started: No such file or directory"):
        Supervisor(config).start()
    assert record.events() == ["start", "server", "quit", "end"]
    assert record.nothing_is_left()


@pytest.fixture
def arguments(config: ServerConfig, tiny_checkpoint: Path) -> list[str]:
    """The command's arguments, for any free ports."""
    ports = ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    return [f"--model-repository={config.model_repository}", f"--model={tiny_checkpoint}", *ports]


# The command in a process of its own, on a machine with a GPU, where nobody is given up because it is slow.
COMMAND = f"""import sys
from triton_omni.supervisor import mps, serve, server_run
mps.visible_gpus = lambda environment: 1
mps._ANSWERS_WITHIN_S = mps._ENDS_WITHIN_S = server_run._ALONE_S = {IN_TIME_S}
sys.exit(serve.main(sys.argv[1:]))"""


@pytest.mark.usefixtures("hang_up_ends")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_daemon_quits_when_a_signal_ends_the_command(
    record: Record, arguments: list[str], number: signal.Signals
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments, "--mps"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("READY ")
        process.send_signal(number)
        process.send_signal(number)
        assert process.wait(IN_TIME_S) == 128 + number
    assert record.events()[-3:] == ["triton-end", "quit", "end"]
    assert record.nothing_is_left()


@pytest.mark.parametrize(("variable", "options"), [("1", []), ("0", ["--mps"]), ("", ["--mps"])])
def test_mps_is_asked_for_by_option_or_variable(
    record: Record, arguments: list[str], variable: str, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNI_MPS", variable)
    monkeypatch.setenv("BEHAVIOUR", "fail")
    assert main([*arguments, *options]) == 1
    assert record.events() == ["start", "server", "triton", "quit", "end"]
    assert main([*arguments, *options, "--no-mps"]) == 1
    assert record.events()[5:] == ["triton"]


def test_a_variable_that_is_neither_is_refused(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMNI_MPS", "yes")
    with pytest.raises(SystemExit):
        main([f"--model-repository={config.model_repository}"])
    assert capsys.readouterr().err == "error: OMNI_MPS must be 0 or 1, not 'yes'\n"
