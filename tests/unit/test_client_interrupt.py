# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while a stream is read: told to a thread of its own, and never raised in the middle of gRPC's code. While the
command is imported it is its end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client_fakes import FakeTriton, chunk, serve_grpc
from triton_omni_client import OmniClient, Request
from triton_omni_client.interrupt import Interrupts, ending_at_once

CLIENT = Path(__file__).parents[2] / "client"


def script() -> str:
    """Return a program that does what the console script does."""
    project = tomllib.loads((CLIENT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["scripts"]["triton-omni"].partition(":")
    return f"from {module} import {name}; {name}()"


def test_the_first_is_told_to_another_thread_and_the_second_is_raised() -> None:
    told: list[threading.Thread] = []
    with Interrupts() as interrupts:
        interrupts.stop = lambda: told.append(threading.current_thread())
        signal.raise_signal(signal.SIGINT)
        assert interrupts.pressed
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert len(told) == 1
    assert told[0] is not threading.current_thread()


def test_it_is_raised_where_nothing_can_be_stopped_and_outside() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert not interrupts.pressed
    assert signal.getsignal(signal.SIGINT) is before


def test_it_ends_a_stream_wherever_the_main_thread_is() -> None:
    """A hundred times at a hundred moments: each stream ends, and none hangs or breaks."""

    def script(_request: Any, context: Any) -> Iterator[Any]:
        while context.is_active():
            yield chunk(text="a")

    with serve_grpc(FakeTriton(script)) as fake, OmniClient(fake.url) as client:
        for moment in range(100):
            with client.stream(Request(text="hi")) as stream, Interrupts() as interrupts:
                interrupts.stop = stream.close
                timer = threading.Timer(moment / 5000, signal.raise_signal, [signal.SIGINT])
                timer.start()
                for _ in stream:
                    if interrupts.pressed:
                        break
                timer.join()
            assert interrupts.pressed


@pytest.mark.parametrize("command", [["-m", "triton_omni_client"], ["-c", script()]], ids=["module", "script"])
def test_it_ends_the_command_without_a_word_while_that_is_imported(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "numpy.py").write_text("import signal; signal.raise_signal(signal.SIGINT)", encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(CLIENT)])}
    done = subprocess.run([sys.executable, *command, "models"], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_it_stays_ignored_where_it_is_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ending_at_once():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_it_is_raised_again_once_the_command_runs() -> None:
    with ending_at_once():
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
