# SPDX-License-Identifier: Apache-2.0
"""Messages to an operator when a server ends: the true cause, from logs as tritonserver and its stages write them."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from triton_omni.supervisor.machine import ServerError
from triton_omni.supervisor.readiness import NO_BACKEND
from triton_omni.supervisor.server_log import PERIOD_S, WRITTEN, Repeats, ServerLog, find_reason
from waiting import IN_TIME_S

# Written by every server on a machine without a GPU, whatever happens later.
BEGINNING = """\
W1121 06:00:01.101 17 pinned_memory_manager.cc:271] "Unable to allocate pinned system memory: no CUDA driver"
E1121 06:00:01.102 17 server.cc:241] "CudaDriverHelper has not been initialized."
I1121 06:00:01.103 17 model_lifecycle.cc:472] "loading: thinker:1"
"""
STUB_GONE = """\
E1121 06:00:09.310 17 backend_model.cc:692] "ERROR: Failed to create instance: Stub process 'talker_0' is not healthy."
E1121 06:00:09.311 17 model_lifecycle.cc:642] "failed to load 'talker' version 1: Internal: Stub process 'talker_0' \
is not healthy."
"""
END = """\
E1121 06:00:12.127 17 model_repository_manager.cc:703] "Invalid argument: ensemble 'qwen2_5_omni' depends on 'talker' \
which has no loaded version. Model 'talker' loading failed with error: version 1 is at UNAVAILABLE state: Internal: x;"
I1121 06:00:12.128 17 server.cc:345] "Timeout 30: Found 0 live models and 0 in-flight non-inference requests"
error: creating server: Internal - failed to load all models
"""
SHARED_MEMORY_FULL = """\
terminate called after throwing an instance of 'triton::backend::python::PythonBackendException'
  what():  Failed to increase the shared memory pool size for key 'region_1' to 1048576 bytes: No space left on device
"""
TRACEBACK = """\
2026-11-21 06:00:07,201 ERROR triton_omni.session.loop the engine failed
Traceback (most recent call last):
  File "/srv/triton_omni/session/loop.py", line 71, in _run
    self._step()
    ~~~~~~~~~~^^
ValueError: No available memory for the cache blocks.

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/srv/triton_omni/vllm_hooks/engine.py", line 40, in load
    raise EngineError("the KV cache does not fit") from error
triton_omni.session.engine.EngineError: the KV cache does not fit
Exception ignored in: <function Pool.__del__>
"""
REFUSED = """\
E1121 06:00:09.311 17 model_lifecycle.cc:642] "failed to load 'thinker' version 1: Internal: SettingsError: \
stage.yaml: engine.x: unknown key (known: a)\\n\\nAt:\\n  /srv/model.py(17): initialize\\n"
"""


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            BEGINNING + TRACEBACK + REFUSED + END,
            "model thinker cannot be loaded: Internal: SettingsError: stage.yaml: engine.x: unknown key (known: a)",
        ),
        (
            BEGINNING + SHARED_MEMORY_FULL + STUB_GONE + END,
            "model talker cannot be loaded: Internal: Stub process 'talker_0' is not healthy after "
            "triton::backend::python::PythonBackendException: Failed to increase the shared memory pool size for key "
            "'region_1' to 1048576 bytes: No space left on device",
        ),
        (
            BEGINNING + TRACEBACK + STUB_GONE + END,
            "model talker cannot be loaded: Internal: Stub process 'talker_0' is not healthy after "
            "triton_omni.session.engine.EngineError: the KV cache does not fit",
        ),
        (
            BEGINNING + "Fatal Python error: Segmentation fault\n\nThread 0x01:\n" + STUB_GONE + END,
            "model talker cannot be loaded: Internal: Stub process 'talker_0' is not healthy after "
            "Fatal Python error: Segmentation fault",
        ),
        (
            BEGINNING + STUB_GONE + END,
            "model talker cannot be loaded: Internal: Stub process 'talker_0' is not healthy",
        ),
        (
            BEGINNING
            + "terminate called after throwing an instance of 'c10::Error'\n  what():  no\nSignal (6) received.\n",
            "c10::Error: no",
        ),
        (BEGINNING + "Signal (11) received.\n 0# 0x00005\n" + END, "Signal (11) received."),
        (BEGINNING + "Signal (15) received.\nerror: it ended badly\n", "it ended badly"),
        (BEGINNING + "terminate called after throwing an instance of 'std::bad_alloc'\n", "std::bad_alloc"),
        (
            BEGINNING + 'E1121 06:00:02.1 17 main.cc:300] "failed to open the repository: /srv"\n' + END,
            "failed to open the repository: /srv",
        ),
        (BEGINNING + END, "creating server: Internal - failed to load all models"),
        (BEGINNING + "bind: no such device", "bind: no such device"),
        ("tritonserver: error while loading shared libraries: libre2.so: cannot open shared object file", None),
    ],
)
def test_the_true_cause_is_found(log: str, reason: str | None) -> None:
    assert find_reason(log.splitlines()) == (reason or log)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGFPE, "it was ended by SIGFPE (Floating point exception)"),
        (signal.SIGBUS, "it was ended by SIGBUS (Bus error)"),
        (signal.SIGILL, "it was ended by SIGILL (Illegal instruction)"),
        (signal.SIGKILL, "it was killed (SIGKILL), as by a system that has no memory left"),
        (signal.SIGSEGV, "Signal (11) received."),
    ],
)
def test_a_signal_that_ended_the_server_is_named(tmp_path: Path, number: signal.Signals, reason: str) -> None:
    """Triton writes a line for SIGSEGV alone, and an earlier error line is no cause."""
    told = 'E1121 06:00:09.310 17 model.cc:1] "earlier"' + "\nSignal (11) received." * (number is signal.SIGSEGV)
    ending = f"import os; print({told!r}, flush=True); os.kill(os.getpid(), {int(number)})"
    log = ServerLog(tmp_path / "log")
    with subprocess.Popen([sys.executable, "-c", ending], stdout=subprocess.PIPE) as process:
        log.follow(process)
        log.close()
    assert process.returncode == -number
    assert log.reason(128 + number) == reason


def test_a_crash_that_was_survived_is_not_the_reason() -> None:
    served = [f'I1121 06:10:00.{number} 17 grpc_server.cc:1] "served"' for number in range(100)]
    end = 'E1121 06:20:00.1 17 main.cc:1] "the licence of the universe has ended"'
    assert find_reason([*TRACEBACK.splitlines(), *served, end]) == "the licence of the universe has ended"


def test_a_model_that_was_not_to_be_loaded_is_not_the_reason() -> None:
    unready = REFUSED.replace("SettingsError: stage.yaml", f"unable to find backend library for backend '{NO_BACKEND}'")
    assert unready != REFUSED
    assert find_reason([*unready.splitlines(), "Signal (11) received."]) == "Signal (11) received."


def test_a_silent_server_is_told_as_silent() -> None:
    assert find_reason([]) == "it said nothing"


def test_the_output_goes_to_the_file_and_its_end_is_kept(tmp_path: Path) -> None:
    log = ServerLog(tmp_path / "server.log")
    command = [sys.executable, "-c", "print('error: the first\\nlast words \\udc80'.encode(errors='replace').decode())"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        log.follow(process)
        log.close()
    assert (tmp_path / "server.log").read_text() == "error: the first\nlast words ?\n"
    assert log.reason() == "the first"


class Filling(io.StringIO):
    """A file whose disk is full and then not."""

    def write(self, line: str) -> int:
        if line.startswith("lost"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(line)


def test_a_disk_that_is_full_is_reported_once_and_so_is_its_end(capfd: pytest.CaptureFixture[str]) -> None:
    log = ServerLog(Path("server.log"))
    log._sink = sink = Filling()
    command = [sys.executable, "-c", "print('a lost1 lost2 b c lost3 d'.replace(' ', chr(10)))"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        log.follow(process)
        log.settle(IN_TIME_S)
    assert sink.getvalue() == "a\nb\nc\nd\n"
    full = "the log server.log cannot be written (No space left on device): lines are lost, the server goes on\n"
    assert capfd.readouterr().err == 2 * (full + "the log server.log is written again\n")


def test_a_log_is_emptied_but_never_that_of_a_server_that_runs(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("of an earlier server")
    running, second = ServerLog(path), ServerLog(path)
    running.open()
    assert path.read_text() == ""
    path.write_text("what it said")
    with pytest.raises(ServerError, match=r"server\.log is that of a running server: choose another with --log-file"):
        second.open()
    assert path.read_text() == "what it said"
    running.close()
    second.open()
    assert path.read_text() == ""
    second.close()


ODDITY = "[ERROR] evhtp.c:3130 ODDITY, resuming when not paused?!? :: (errno: None)\n"
FULL = "[warn] Error from accept() call: Too many open files\n"
TRACE = "Traceback (most recent call last):\n"


@pytest.mark.parametrize("line", [ODDITY, FULL, TRACE])
def test_a_line_that_repeats_is_counted(line: str) -> None:
    now = 0.0
    repeats = Repeats(lambda: now)
    assert [list(repeats.pass_on(line)) for _ in range(50)] == [[line]] * WRITTEN + [[]] * (50 - WRITTEN)
    assert list(repeats.pass_on("another\n")) == ["another\n"]
    now = PERIOD_S
    assert list(repeats.pass_on(line)) == [f"{line.rstrip()} (30 times more in 10 s)\n", line]
    assert list(repeats.rest()) == []


def test_lines_of_which_none_repeats_all_pass() -> None:
    repeats = Repeats(lambda: 0.0)
    lines = [f"request {number}\n" for number in range(5000)]
    assert [passed for line in lines for passed in repeats.pass_on(line)] == lines


def test_what_a_caller_repeats_does_not_displace_the_reason(tmp_path: Path) -> None:
    log = ServerLog(tmp_path / "server.log")
    command = [sys.executable, "-c", f"print('error: the first'); [print({ODDITY.strip()!r}) for _ in range(100_000)]"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        log.follow(process)
        process.wait()
        log.close()
    assert log.reason() == "the first"
    assert (tmp_path / "server.log").stat().st_size < 100 * len(ODDITY)
