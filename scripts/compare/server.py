# SPDX-License-Identifier: Apache-2.0
"""Runs the server program of a checkout of this repository, this one or another, as its command line does."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from triton_omni.supervisor.guard import Guard
from triton_omni.supervisor.leftovers import end_group
from triton_omni.supervisor.machine import ServerError, ServerNotReady, prepend
from triton_omni.supervisor.serve import signals_wait

_PROGRAM: Final = "triton-omni-serve"
"""The server's name in `pyproject.toml`, in every checkout; the module that it names differs."""
_FREE_PORTS: Final = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
_STOPS_WITHIN_S = 90.0
"""A server without replies gives its stages and Triton 38 s, and an MPS daemon some 20 s."""


@dataclass(frozen=True)
class Checkout:
    """Code and models of this repository, and the Python that runs them."""

    root: Path
    python: Path
    module: str
    """Its server program."""

    @property
    def models(self) -> Path:
        """Its model repository."""
        return self.root / "model_repository"

    def environment(self) -> dict[str, str]:
        """This process's; the server program is this checkout's even where PYTHONPATH names another."""
        code = prepend([self.root / "backend_src"], os.environ.get("PYTHONPATH", ""))
        # A variant says its settings itself.
        return {key: value for key, value in os.environ.items() if key != "OMNI_PROFILE"} | {"PYTHONPATH": code}


HERE: Final = Checkout(Path(__file__).resolve().parents[2], Path(sys.executable), "triton_omni.supervisor.serve")
"""This one, by the Python that runs this."""


def parse_checkout(folder: str) -> Checkout:
    """Another checkout, after `./build.sh setup` there.

    Raises:
        ValueError: the folder is none, or has no environment, or one that imports other code.
    """
    try:
        root = Path(folder).resolve()
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
        module = str(project["project"]["scripts"][_PROGRAM]).partition(":")[0]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder} is no checkout of this repository: its pyproject.toml names no {_PROGRAM}; "
            "make one by `git worktree add`"
        ) from error
    python = root / ".venv" / "bin" / "python"
    if not python.is_file():
        raise ValueError(f"{folder} has no .venv/bin/python: run ./build.sh setup there")
    if (code := _code_of(python)) != str(root / "backend_src"):
        raise ValueError(
            f"{folder} has a .venv that imports triton_omni from {code or 'nowhere'}: "
            "give it one of its own by ./build.sh setup there"
        )
    return Checkout(root, python, module)


def _code_of(python: Path) -> str:
    """The folder of the code that stages of this environment run; empty = there is none. They ignore PYTHONPATH, as
    Triton's Python backend is an isolated Python.
    """
    ask = "import pathlib, triton_omni; print(pathlib.Path(triton_omni.__file__).resolve().parents[1])"
    asked = subprocess.run([python, "-I", "-c", ask], stdout=subprocess.PIPE, text=True, check=False)
    return asked.stdout.strip()


@contextmanager
def server(checkout: Checkout, options: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The server program, started and at the end stopped; it tells the steps of its start on standard error.

    Args:
        checkout: whose server it is.
        options: of its command line, without ports, log and model repository.
        log: its log, in an existing folder.

    Raises:
        ServerError: it ended by itself, or did not stop and was ended by force.
    """
    command = [str(checkout.python), "-m", checkout.module, "--model-repository", str(checkout.models), *_FREE_PORTS]
    command += ["--log-file", str(log), "--drain-timeout", "0", *options]
    # In a session of its own a terminal's Ctrl-C reaches this process alone, which stops it in order.
    with subprocess.Popen(
        command,
        env=checkout.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            with closing(Guard(process.pid)):
                yield process
                if process.poll() is not None:
                    raise ServerError(f"the server ended by itself: {_end(process, log)}")
        finally:
            with signals_wait():
                _stop(process, log)


def wait_ready(process: subprocess.Popen[bytes], log: Path) -> Mapping[str, str]:
    """Block until a server is ready; its `HOST:PORT` of `http`, `grpc` and `metrics`.

    The program itself gives up a start that takes too long.

    Raises:
        ServerNotReady: it ended before.
    """
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(b"READY "):
            return dict(word.split("=", 1) for word in line.decode().split()[1:])
    process.wait()
    raise ServerNotReady(f"the server was not ready: {_end(process, log)}")


def _stop(process: subprocess.Popen[bytes], log: Path) -> None:
    process.terminate()  # nothing where it has ended
    try:
        process.wait(_STOPS_WITHIN_S)
    except subprocess.TimeoutExpired as error:
        started = psutil.Process(process.pid).children(recursive=True)
        end_group(process)
        # Its guard ends tritonserver, which leads a group of its own: the next server needs the GPU's memory.
        psutil.wait_procs(started, _STOPS_WITHIN_S)
        raise ServerError(
            f"the server did not stop within {_STOPS_WITHIN_S:g} s, and was killed; log: {log}"
        ) from error


def _end(process: subprocess.Popen[bytes], log: Path) -> str:
    return f"exit code {process.returncode}, its reason on standard error; log: {log}"
