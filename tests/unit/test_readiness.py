# SPDX-License-Identifier: Apache-2.0
"""Readiness, with a stand-in for Triton's two calls."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from triton_omni.supervisor.model_control import ModelControlError
from triton_omni.supervisor.readiness import Readiness, say_ready, say_unready
from waiting import IN_TIME_S

BROKEN, IDLE = 'name: "standstill"\nbackend: "none"\n', 'name: "standstill"\nbackend: "python"\n'


class Triton:
    """Loads what is in a folder and knows the Python backend alone."""

    def __init__(self, repository: Path) -> None:
        self.repository = repository
        self.calls: list[tuple[str, str]] = []
        self.refusals = 0
        self.is_gone = False
        self.may_answer = threading.Event()
        self.may_answer.set()

    def load(self, model: str) -> None:
        assert self.may_answer.wait(IN_TIME_S)
        config = (self.repository / model / "config.pbtxt").read_text()
        self.calls.append(("load", config))
        if self.is_gone:
            raise ModelControlError("failed to connect to all addresses")
        if 'backend: "python"' not in config:
            refusal = "Invalid argument: unable to find backend library for backend 'none', try specifying runtime"
            raise ModelControlError(f"load failed for model '{model}': version 1 is at UNAVAILABLE state: {refusal}")
        assert "class TritonPythonModel" in (self.repository / model / "1" / "model.py").read_text()
        if self.refusals:
            self.refusals -= 1
            raise ModelControlError("no more processes")

    def unload(self, model: str) -> None:
        self.calls.append(("unload", model))

    def loads(self) -> list[bool]:
        """Return for each load whether its model can be loaded."""
        return ["python" in config for call, config in self.calls if call == "load"]


@pytest.fixture
def triton(tmp_path: Path) -> Triton:
    return Triton(tmp_path)


def test_a_server_is_made_unready_by_a_model_that_cannot_be_loaded(triton: Triton) -> None:
    say_unready(triton, triton.repository, "standstill")
    assert triton.calls == [("load", BROKEN)]


def test_the_model_that_makes_it_ready_ends_its_process_as_the_stages_do(triton: Triton) -> None:
    """Triton's way to end an interpreter is one that newer versions take for a fatal error."""
    say_unready(triton, triton.repository, "standstill")
    say_ready(triton, triton.repository, "standstill")
    model = triton.repository / "standstill" / "1" / "model.py"
    ending = "from model import TritonPythonModel\nTritonPythonModel().finalize()\nprint('goes on')"
    done = subprocess.run([sys.executable, "-c", ending], cwd=model.parent, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_it_is_ready_again_when_the_model_was_loaded_and_unloaded(triton: Triton) -> None:
    say_unready(triton, triton.repository, "standstill")
    say_ready(triton, triton.repository, "standstill")
    load, unload = triton.calls[1:]
    assert load[1].startswith(IDLE)
    assert unload == ("unload", "standstill")


def test_each_change_is_said_once_and_the_first_is_no_change(triton: Triton) -> None:
    readiness = Readiness(triton, triton.repository)
    for ready in (True, True, False, False, True, True):
        readiness.set_ready(ready)
        readiness.join(IN_TIME_S)
    assert triton.loads() == [False, True]


def test_what_triton_refused_is_said_again_and_reported_once(
    triton: Triton, capsys: pytest.CaptureFixture[str]
) -> None:
    readiness, faults = Readiness(triton, triton.repository), []
    readiness.on_fault = lambda: faults.append(1)
    triton.refusals = 2
    for ready in (False, True, True, True, True):
        readiness.set_ready(ready)
        readiness.join(IN_TIME_S)
    assert triton.loads() == [False, True, True, True]
    assert [call for call, _ in triton.calls].count("unload") == 1
    failed, made = "could not be made ready: no more processes", "was made ready"
    assert capsys.readouterr().err == f"readiness: the server {failed}\nreadiness: the server {made}\n"
    assert len(faults) == 2


def test_a_server_that_could_not_be_made_unready_is_told_again_and_that_reported(
    triton: Triton, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only Triton's refusal of the backend says that it is unready: a Triton that is not there says nothing."""
    readiness, faults = Readiness(triton, triton.repository), []
    readiness.on_fault = lambda: faults.append(1)
    triton.is_gone = True
    for is_gone in (True, True, False, False):
        triton.is_gone = is_gone
        readiness.set_ready(False)
        readiness.join(IN_TIME_S)
    assert triton.loads() == [False, False, False]
    assert len(faults) == 2
    failed, made = "could not be made not ready: failed to connect to all addresses", "was made not ready"
    assert capsys.readouterr().err == f"readiness: the server {failed}\nreadiness: the server {made}\n"


def test_a_failure_may_have_had_its_effect_so_the_next_change_is_told_whatever_it_is(triton: Triton) -> None:
    readiness = Readiness(triton, triton.repository)
    triton.is_gone = True
    readiness.set_ready(False)
    readiness.join(IN_TIME_S)
    triton.is_gone = False
    readiness.set_ready(True)
    readiness.join(IN_TIME_S)
    assert triton.loads() == [False, True]


def test_an_end_that_could_not_be_told_is_reported(triton: Triton, capsys: pytest.CaptureFixture[str]) -> None:
    readiness = Readiness(triton, triton.repository)
    triton.is_gone = True
    readiness.end()
    readiness.join(IN_TIME_S)
    said = "readiness: the server could not be made not ready: failed to connect to all addresses\n"
    assert capsys.readouterr().err == said


def test_who_tells_does_not_wait_for_triton(triton: Triton) -> None:
    triton.may_answer.clear()
    readiness = Readiness(triton, triton.repository)
    for ready in (False, True, False):
        readiness.set_ready(ready)
    assert not triton.calls
    triton.may_answer.set()
    readiness.join(IN_TIME_S)
    assert triton.loads() == [False]


def test_the_end_is_said_by_a_model_of_its_own(triton: Triton) -> None:
    """A stage that goes on while the server drains does not make it ready."""
    readiness = Readiness(triton, triton.repository)
    readiness.end()
    readiness.set_ready(False)
    readiness.join(IN_TIME_S)
    readiness.set_ready(True)
    readiness.join(IN_TIME_S)
    broken = [config for call, config in triton.calls if call == "load" and '"none"' in config]
    assert broken == [BROKEN.replace("standstill", "draining"), BROKEN]


def test_a_triton_that_stands_still_does_not_hold_its_own_stop_up(triton: Triton) -> None:
    """Its stop took 22 s longer than it may."""
    triton.may_answer.clear()
    readiness = Readiness(triton, triton.repository)
    readiness.end()
    assert not triton.calls
    triton.may_answer.set()
    readiness.join(IN_TIME_S)
    assert len(triton.calls) == 1
