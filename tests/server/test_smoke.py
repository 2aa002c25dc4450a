# SPDX-License-Identifier: Apache-2.0
"""deploy/smoke.sh against the server that `build.sh gateway` starts, with the settings that are shipped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from gateway_fakes import MODEL, USER
from processes import UNMEASURED, family, is_running
from server.serving import NEVER_S, ROOT, wait_for
from triton_omni.session.ledger_table import STAGES

SMOKE = ROOT / "deploy" / "smoke.sh"


by_its_commands = pytest.mark.skipif(
    Path(sys.prefix) != ROOT / ".venv", reason="build.sh would set up an environment: run the tests by it"
)


@pytest.fixture
def command(tiny_checkpoint: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """`build.sh gateway` with a server of its own; ended by its own number whatever happens."""
    places = {"OMNI_MODEL": str(tiny_checkpoint), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [ROOT / "build.sh", "gateway", "--port", "0"],
        env={**os.environ, **UNMEASURED, **places},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


@dataclass(frozen=True)
class Started:
    """The servers that the command started, by its READY line and its processes."""

    openai: str
    grpc: str
    http: str
    pids: list[int]

    @classmethod
    def by(cls, command: subprocess.Popen[str]) -> Started:
        """Wait for the READY line."""
        assert command.stdout is not None
        address = r"127\.0\.0\.1:\d+"
        ready = re.fullmatch(rf"READY openai=(http://{address})/v1 grpc=({address})\n", command.stdout.readline())
        assert ready, command.communicate()[1]
        pids = family(command.pid)
        (port,) = re.findall(r"--http-port=(\d+)", " ".join(" ".join(psutil.Process(pid).cmdline()) for pid in pids))
        return cls(ready[1], ready[2], f"127.0.0.1:{port}", pids)

    def shared_memory(self) -> list[str]:
        """Return the shared memory of the session ledger and of Triton's stages, by the process ids in the names."""
        found = (re.match(r"triton[-_]omni[-_]\d+-\d+-(\d+)-", path.name) for path in Path("/dev/shm").iterdir())
        return [name.string for name in found if name and int(name[1]) in self.pids]

    def check_that_nothing_is_left(self, folder: Path) -> None:
        """Check its processes, its shared memory, its files and its ports."""
        wait_for(lambda: not any(map(is_running, self.pids)), lambda: self.pids)
        assert (self.shared_memory(), list(folder.iterdir())) == ([], [])
        for address in (self.openai, f"http://{self.grpc}", f"http://{self.http}"):
            with pytest.raises(httpx.ConnectError):
                httpx.get(address)


def smoke(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SMOKE_READY_S": "1", "SMOKE_STOP_S": "100"}
    return subprocess.run(
        [SMOKE, *arguments], env=environment, capture_output=True, text=True, timeout=500, check=False
    )


@by_its_commands
def test_a_server_passes_from_ready_to_its_stop_and_leaves_nothing(
    command: subprocess.Popen[str], tmp_path: Path
) -> None:
    started = Started.by(command)
    assert len(started.shared_memory()) > len(STAGES)
    assert any(tmp_path.iterdir())
    with openai.OpenAI(base_url=f"{started.openai}/v1", api_key="any", max_retries=0) as client:
        reply = client.chat.completions.create(model=MODEL, messages=USER, max_completion_tokens=5)
    assert reply.choices[0].message.content
    assert reply.usage.completion_tokens == 5
    done = smoke("server", str(command.pid), started.http, started.grpc)
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
    output, errors = command.communicate(timeout=NEVER_S)
    assert (command.returncode, output) == (143, "")
    assert errors.startswith("starting: tritonserver is process ")
    started.check_that_nothing_is_left(tmp_path)


def test_what_is_no_server_fails() -> None:
    done = smoke("server", str(os.getpid()), "127.0.0.1:9", "127.0.0.1:9")
    assert (done.returncode, done.stderr) == (1, "FAIL  the server: not within 1 s\n")


@pytest.mark.parametrize("arguments", [[], ["image"], ["server", "1"], ["elsewhere"]])
def test_a_wrong_command_line_is_refused(arguments: list[str]) -> None:
    done = smoke(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("FAIL  usage: ")
