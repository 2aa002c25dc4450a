# SPDX-License-Identifier: Apache-2.0
"""deploy/smoke.sh before a stand-in for docker: what it starts, what it looks for, and what it does not let pass.

`server/test_smoke.py` runs the checks that need no container against a real server.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SMOKE = Path(__file__).parents[2] / "deploy" / "smoke.sh"
# A container that is ready except for two looks after a stage of it was killed. Its environment names the faults.
DOCKER = """#!/usr/bin/env bash
state=$(dirname "$0")
echo "$*" >>"$state/calls"
command=$1
shift
case $command in
    run) echo container-1 ;;
    inspect) if [[ $* == *ExitCode* ]]; then echo "${CODE:-143}"; else echo true; fi ;;
    exec)
        shift
        case $* in
            "triton-omni ready"*)
                [[ -e $state/killed ]] || exit 0
                echo >>"$state/looks"
                (($(wc -l <"$state/looks") > 2))
                ;;
            "triton-omni say"*http://*) head -c "${BY_HTTP:-96044}" /dev/zero ;;
            "triton-omni say"*) head -c 96044 /dev/zero ;;
            "id -u") echo "${USER_ID:-10001}" ;;
            "touch /probe") exit "${TOUCH:-1}" ;;
            "bash -c kill -KILL"*) touch "$state/killed" ;;
            bash*) if [[ -e $state/killed ]]; then echo "${REVIVED:-42}"; else echo 41; fi ;;
        esac
        ;;
esac
"""

Smoke = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def smoke(tmp_path: Path) -> Smoke:
    """Runs the script on an image; the stand-in's environment by keyword."""
    docker = tmp_path / "docker"
    docker.write_text(DOCKER)
    docker.chmod(0o755)

    def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            [SMOKE, "image", "triton-omni", *options],
            env={**os.environ, "PATH": path, "SMOKE_READY_S": "5", "SMOKE_REVIVED_S": "5", **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def test_an_image_passes_and_its_container_is_removed(smoke: Smoke, tmp_path: Path) -> None:
    done = smoke("--gpus", "all")
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert all(line.startswith("ok    ") for line in said)
    assert len(said) == 7
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == (
        "run --detach --read-only --tmpfs /tmp --shm-size 1g --cap-drop ALL --security-opt no-new-privileges "
        "-e OMNI_MODEL=random:tiny --gpus all triton-omni"
    )
    assert calls[-1] == "rm -f -v container-1"


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"USER_ID": "0"}, "the server runs as root"),
        ({"TOUCH": "0"}, "the root file system can be written"),
        ({"BY_HTTP": "96046"}, "first: 96046 bytes of speech over HTTP, 96044 over gRPC"),
        ({"REVIVED": "41"}, "token2wav has the process that was killed"),
        ({"CODE": "137"}, "the stop ended with code 137 instead of 143"),
    ],
)
def test_what_is_not_so_fails(smoke: Smoke, tmp_path: Path, environment: dict[str, str], reason: str) -> None:
    done = smoke(**environment)
    assert (done.returncode, done.stderr) == (1, f"FAIL  {reason}\n")
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "rm -f -v container-1"
