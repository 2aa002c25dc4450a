# SPDX-License-Identifier: Apache-2.0
"""The supervisor against a stand-in for tritonserver: start, readiness, death, ports, signals, stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from triton_omni.serving.machine import ServerError, ServerNotReady, choose_ports, find_triton, visible_gpus
from triton_omni.serving.memory_pool import memory_pool_bytes, pool_bytes
from triton_omni.serving.model_folder import ModelFolderError, model_folder
from triton_omni.serving.model_folder import main as print_model_folder
from triton_omni.serving.supervisor import ServerConfig, Supervisor, main
from triton_omni.settings import TalkerSettings, ThinkerSettings

# Answers the readiness path as tritonserver does; what it should do otherwise is told by its environment.
STAND_IN = """#!{python}
import http.server, json, os, signal, sys, threading, time
flags = dict(argument[2:].split("=", 1) for argument in sys.argv[1:])
behaviour = os.environ.get("BEHAVIOUR", "serve")
print(json.dumps({{"flags": flags, "model": os.environ["OMNI_MODEL"]}}), flush=True)
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
    def log_message(self, *_): pass
http.server.HTTPServer((flags["http-address"], int(flags["http-port"])), Ready).serve_forever()
"""


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


def test_serves_on_free_loopback_ports_and_stops_cleanly(repository: Path) -> None:
    with Supervisor(config(repository)) as server:
        assert server.http_url.startswith("127.0.0.1:")
        assert len({server.http_url, server.grpc_url, server.metrics_url}) == 3
        assert server.exit_code is None
        assert server.stop() < 5
        assert server.exit_code == 0
    said = json.loads((repository.parent / "server.log").read_text())
    assert said["flags"]["http-address"] == said["flags"]["grpc-address"] == said["flags"]["metrics-address"]
    assert said["flags"]["grpc-port"] == server.grpc_url.rpartition(":")[2]
    assert said["model"] == os.environ["OMNI_MODEL"]


def test_the_failing_model_and_its_reason_are_named(repository: Path) -> None:
    with pytest.raises(ServerNotReady) as caught, Supervisor(config(repository, environment={"BEHAVIOUR": "fail"})):
        pass
    text = str(caught.value)
    assert "ended with code 1: model thinker cannot be loaded: Internal: SettingsError: stage.yaml: engine.x" in text
    assert "At:" not in text
    assert "server.log" in text


def test_a_server_that_never_gets_ready_is_stopped(repository: Path) -> None:
    server = Supervisor(config(repository, environment={"BEHAVIOUR": "loading"}, ready_timeout_s=1.0))
    with pytest.raises(ServerNotReady, match="not ready after 1 s"), server:
        pass
    assert server.exit_code == 0


def test_a_deaf_server_is_ended_after_its_exit_timeout(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton_omni.serving.supervisor._KILL_AFTER_S", 0.5)
    with Supervisor(config(repository, environment={"BEHAVIOUR": "deaf"}, exit_timeout_s=0)) as server:
        assert server.stop() >= 0.5
        assert server.exit_code == 128 + signal.SIGKILL


def test_a_taken_port_is_refused_by_service_and_number(repository: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=rf"grpc cannot listen on 127.0.0.1:{port} .*--grpc-port"):
            Supervisor(config(repository, grpc_port=port)).start()


def test_two_services_cannot_share_a_port() -> None:
    free = choose_ports("127.0.0.1", {"http": 0})["http"]
    with pytest.raises(ServerError, match="grpc cannot listen"):
        choose_ports("127.0.0.1", {"http": free, "grpc": free})


def test_a_host_that_is_not_here_is_refused() -> None:
    with pytest.raises(ServerError, match=r"http cannot listen on 192\.0\.2\.1:0"):
        choose_ports("192.0.2.1", {"http": 0})


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_prints_ready_and_passes_the_servers_exit_code_on(
    repository: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODE", "7")
    arguments = ["--model-repository", str(repository), "--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "triton_omni.serving.supervisor", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert [part.partition("=")[0] for part in line.split()] == ["READY", "http", "grpc", "metrics"]
        process.send_signal(number)
        assert process.wait(20) == 7


def test_the_command_says_why_in_one_line(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model-repository", str(repository / "nowhere")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_port_out_of_range_is_refused(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model-repository", str(repository), "--http-port", "70000"])
    assert "70000 is not in 0..65535" in capsys.readouterr().err


def test_a_stop_before_readiness_ends_the_wait(repository: Path) -> None:
    server = Supervisor(config(repository, environment={"BEHAVIOUR": "loading"}))
    server.request_stop()
    begin = time.monotonic()
    with pytest.raises(ServerNotReady, match="stopped before"), server:
        pass
    assert time.monotonic() - begin < 10


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


@pytest.mark.parametrize(("chosen", "seen"), [(None, 2), ("", 0), ("1", 1), ("0,1", 2), ("-1", 0), ("0,1,2", 2)])
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


def test_neither_folder_nor_id_is_refused() -> None:
    with pytest.raises(ModelFolderError, match="neither a folder nor"):
        model_folder("not an id")
