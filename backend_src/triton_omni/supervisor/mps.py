# SPDX-License-Identifier: Apache-2.0
"""CUDA MPS for one server: a control daemon of its own, under which the processes of the stages share a GPU at once.

It knows no tritonserver; no other control daemon and no setting of the GPU is touched.
Source: https://docs.nvidia.com/deploy/mps/
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from triton_omni.core.arguments import say
from triton_omni.supervisor.guard import Guard
from triton_omni.supervisor.leftovers import end_group
from triton_omni.supervisor.machine import ServerError, visible_gpus

_PROGRAM = "nvidia-cuda-mps-control"
# The path of a Unix socket has at most 107 characters, and TMPDIR may be a long one.
_SHORT_FOLDER = "/tmp"
_ANSWERS_WITHIN_S = 10.0
_ENDS_WITHIN_S = 10.0
_POLL_S = 0.05


@contextlib.contextmanager
def mps_daemon(environment: Mapping[str, str]) -> Iterator[tuple[dict[str, str], Guard]]:
    """Run a guarded control daemon; within the context, processes started with the variables given are its clients.

    The daemon starts MPS servers when the first client comes, and must outlive its clients. At the end of the context
    it gets the order to quit; if it or its servers do not, they are ended by force.

    Raises:
        ServerError: no GPU is seen, the program is not installed, or the daemon does not start.
    """
    program = _find(environment)
    # An ending MPS server may still add a file, which must not fail a stop.
    with tempfile.TemporaryDirectory(prefix="omni-mps-", dir=_SHORT_FOLDER, ignore_cleanup_errors=True) as folder:
        variables = {f"CUDA_MPS_{kind.upper()}_DIRECTORY": str(Path(folder, kind)) for kind in ("pipe", "log")}
        for directory in variables.values():
            Path(directory).mkdir()
        env = _daemon_environment(environment) | variables
        output = Path(folder, "output")
        process = _start(program, env, output)
        try:
            with contextlib.closing(Guard(process.pid, folders=[Path(folder)])) as guard:
                _wait_ready(process, program, env, output)
                yield variables, guard
        finally:
            _end(process, program, env)


def _find(environment: Mapping[str, str]) -> str:
    if not visible_gpus(environment):
        raise ServerError("MPS was asked for, but this process sees no NVIDIA GPU")
    program = shutil.which(_PROGRAM, path=environment.get("PATH", ""))
    if program is None:
        raise ServerError(f"MPS was asked for, but there is no {_PROGRAM} on PATH: it comes with NVIDIA's driver")
    return program


def _daemon_environment(environment: Mapping[str, str]) -> dict[str, str]:
    env = dict(environment)
    # The daemon renumbers GPUs chosen by index, and a client's own choice would then refer to the new numbers.
    if not env.get("CUDA_VISIBLE_DEVICES", "").startswith(("GPU-", "MIG-")):
        env.pop("CUDA_VISIBLE_DEVICES", None)
    return env


def _start(program: str, env: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
    # In the foreground (-f) the daemon is a child that can be waited for and ended by its own pid. A terminal's Ctrl-C
    # does not reach its own process group.
    with output.open("wb") as file:
        return subprocess.Popen(
            [program, "-f"],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait_ready(process: subprocess.Popen[bytes], program: str, env: Mapping[str, str], output: Path) -> None:
    deadline = time.monotonic() + _ANSWERS_WITHIN_S
    while not _send_command(program, env, "get_server_list"):
        if process.poll() is not None:
            said = output.read_text(errors="replace").strip() or "it said nothing"
            raise ServerError(f"{_PROGRAM} ended with code {process.returncode}: {said.splitlines()[-1]}")
        if time.monotonic() > deadline:
            raise ServerError(f"{_PROGRAM} did not answer within {_ANSWERS_WITHIN_S:g} s")
        time.sleep(_POLL_S)


def _end(process: subprocess.Popen[bytes], program: str, env: Mapping[str, str]) -> None:
    if _send_command(program, env, "quit"):
        try:
            process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            say(f"warning: {_PROGRAM} did not quit within {_ENDS_WITHIN_S:g} s and is ended by force")
    end_group(process)


def _send_command(program: str, env: Mapping[str, str], command: str) -> bool:
    """Send the daemon a command; return True if it took it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        ended = subprocess.run(
            [program],
            env=env,
            input=f"{command}\n".encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_ENDS_WITHIN_S,
            start_new_session=True,
            check=False,
        )
        return ended.returncode == 0
    return False
