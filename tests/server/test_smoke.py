# SPDX-License-Identifier: Apache-2.0
"""deploy/smoke.sh against a server as `build.sh serve` starts it, with the settings that are shipped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from processes import UNMEASURED

ROOT = Path(__file__).parents[2]
SMOKE = ROOT / "deploy" / "smoke.sh"
PORTS = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]


@pytest.fixture
def command(tiny_checkpoint: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The supervisor's command, ready; ended by its own number whatever happens."""
    options = ["--model-repository", str(ROOT / "model_repository"), "--model", str(tiny_checkpoint), *PORTS]
    log = ["--log-file", str(tmp_path / "server.log")]
    module = [sys.executable, "-m", "triton_omni.serving.supervisor"]
    environment = {**os.environ, **UNMEASURED, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*module, *options, *log], stdout=subprocess.PIPE, env=environment, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


def smoke(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SMOKE_READY_S": "1"}
    return subprocess.run(
        [SMOKE, *arguments], env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def test_a_server_passes_from_ready_to_its_stop(command: subprocess.Popen[str]) -> None:
    assert command.stdout is not None
    ready = re.match(r"READY http=(\S+) grpc=(\S+) metrics=", command.stdout.readline())
    assert ready
    done = smoke("server", str(command.pid), ready[1], ready[2])
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert [re.sub(r"\d+", "N", line) for line in done.stdout.splitlines()] == [
        "ok    ready",
        "ok    first: N bytes of speech over HTTP and over gRPC",
        "ok    tokenNwav was killed, and started again within N s",
        "ok    afterwards: N bytes of speech over HTTP and over gRPC",
        "ok    stopped within N s",
    ]
    replies = re.findall(r"(\d+) bytes", done.stdout)
    assert replies[0] == replies[1], "the same request has the same length of speech before and after"
    assert command.wait(5) == 143


def test_what_is_no_server_fails() -> None:
    done = smoke("server", str(os.getpid()), "127.0.0.1:9", "127.0.0.1:9")
    assert (done.returncode, done.stderr) == (1, "FAIL  the server: not within 1 s\n")


@pytest.mark.parametrize("arguments", [[], ["image"], ["server", "1"], ["elsewhere"]])
def test_a_wrong_command_line_is_refused(arguments: list[str]) -> None:
    done = smoke(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("FAIL  usage: ")
