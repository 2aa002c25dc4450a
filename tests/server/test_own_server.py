# SPDX-License-Identifier: Apache-2.0
"""`build.sh gateway` with a server of its own, with the settings that are shipped: from READY to its stop."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from gateway_fakes import MODEL, USER
from processes import UNMEASURED, family, is_running
from server.serving import NEVER_S, ROOT, STAGES, wait_for

pytestmark = pytest.mark.skipif(
    Path(sys.prefix) != ROOT / ".venv", reason="build.sh would set up an environment: run the tests by it"
)


@pytest.fixture
def command(tiny_checkpoint: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The command, started; ended by its own number whatever happens."""
    places = {"OMNI_MODEL": str(tiny_checkpoint), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [ROOT / "build.sh", "gateway", "--port", "0"],
        env={**os.environ, **UNMEASURED, **places},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.terminate()


def shared_memory_of(pids: list[int]) -> list[str]:
    """Of the session ledger and of Triton's stages, by the process ids in their names."""
    found = (re.match(r"triton[-_]omni[-_]\d+-\d+-(\d+)-", path.name) for path in Path("/dev/shm").iterdir())
    return [name.string for name in found if name and int(name[1]) in pids]


def test_it_serves_from_ready_to_its_stop_and_leaves_nothing(command: subprocess.Popen[str], tmp_path: Path) -> None:
    assert command.stdout is not None
    ready = re.fullmatch(
        r"READY openai=(http://127\.0\.0\.1:\d+)/v1 grpc=(127\.0\.0\.1:\d+)\n", command.stdout.readline()
    )
    assert ready, command.communicate()[1]
    with openai.OpenAI(base_url=f"{ready[1]}/v1", api_key="any", max_retries=0) as client:
        reply = client.chat.completions.create(model=MODEL, messages=USER, max_completion_tokens=5)
    assert reply.choices[0].message.content
    assert reply.usage.completion_tokens == 5
    pids = family(command.pid)
    assert len(shared_memory_of(pids)) > len(STAGES)
    assert any(tmp_path.iterdir())
    command.terminate()
    output, errors = command.communicate(timeout=NEVER_S)
    assert (command.returncode, output) == (143, "")
    assert errors.startswith("gateway: starting the server (its log: ")
    assert [line for line in errors.splitlines()[1:] if not line.startswith("INFO: ")] == []
    wait_for(lambda: not any(map(is_running, pids)), lambda: pids)
    assert (shared_memory_of(pids), list(tmp_path.iterdir())) == ([], [])
    for address in (ready[1], f"http://{ready[2]}"):
        with pytest.raises(httpx.ConnectError):
            httpx.get(address)
