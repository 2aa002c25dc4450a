# SPDX-License-Identifier: Apache-2.0
"""The guard ends everything that a killed supervisor leaves, and nothing after an orderly end."""

from __future__ import annotations

import errno
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest

from processes import children, is_running
from triton_omni.session.server_folder import process_of, server_name
from triton_omni.supervisor.guard import Guard
from triton_omni.supervisor.leftovers import end_group_of
from waiting import IN_TIME_S, wait_for

SENT_FIRST = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}

SUPERVISOR = """
import subprocess, sys
from pathlib import Path
from triton_omni.supervisor.guard import Guard
server = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True)
stage = int(server.stdout.readline())
guard = Guard(server.pid, regions=sys.argv[1], folders=[Path(sys.argv[2])])
print(server.pid, stage, flush=True)
for line in sys.stdin:
    guard.renew()
    print("renewed", flush=True)
guard.close()
print("ended", flush=True)
"""


@dataclass(frozen=True)
class Guarded:
    """A process that guards a group of two, as a supervisor does."""

    supervisor: subprocess.Popen[str]
    server: int
    stage: int
    region: Path
    folder: Path

    def is_left(self) -> list[bool]:
        """Return which of these are there: its server, the server's stage, shared memory, folder."""
        return [is_running(self.server), is_running(self.stage), self.region.exists(), self.folder.exists()]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Guarded]:
    prefix, folder = f"triton_omni_test_{secrets.token_hex(8)}_", tmp_path / "laid-out"
    region = Path("/dev/shm", f"{prefix}1")
    region.touch()
    folder.mkdir()
    command = [sys.executable, "-c", SUPERVISOR, prefix, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        server, stage = map(int, process.stdout.readline().split())
        yield Guarded(process, server, stage, region, folder)
        process.kill()
    if is_running(server):
        end_group_of(server_name(server))
    region.unlink(missing_ok=True)


def test_all_that_a_killed_supervisor_leaves_is_ended_and_removed(running: Guarded) -> None:
    assert running.is_left() == [True] * 4
    running.supervisor.kill()
    wait_for(lambda: not any(running.is_left()))


def test_its_stages_are_ended_too_if_the_server_was_killed_with_it(running: Guarded) -> None:
    os.kill(running.server, signal.SIGKILL)
    running.supervisor.kill()
    wait_for(lambda: not any(running.is_left()))


def test_of_a_supervisor_that_ends_in_order_nothing_is_touched(running: Guarded) -> None:
    _, error = running.supervisor.communicate("")
    assert error is None
    assert running.supervisor.returncode == 0
    assert running.is_left() == [True] * 4


def test_a_guard_outlives_what_a_service_manager_sends_first(running: Guarded) -> None:
    (guard,) = guards_of(running.supervisor.pid)
    for number in SENT_FIRST:
        os.kill(guard, number)
    running.supervisor.kill()
    wait_for(lambda: not any(running.is_left()))


@pytest.mark.parametrize("deaths", [1, 2, 3])
def test_a_guard_that_was_killed_is_replaced_by_one_that_does_the_same(running: Guarded, deaths: int) -> None:
    assert running.supervisor.stdin is not None
    assert running.supervisor.stdout is not None
    for _ in range(deaths):
        (killed,) = guards_of(running.supervisor.pid)
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda killed=killed: not is_running(killed))  # type: ignore[misc]
        running.supervisor.stdin.write("renew\n")
        running.supervisor.stdin.flush()
        assert running.supervisor.stdout.readline() == "renewed\n"
        (replaced,) = guards_of(running.supervisor.pid)
        assert replaced != killed
    running.supervisor.kill()
    wait_for(lambda: not any(running.is_left()))


def test_a_guard_that_cannot_be_replaced_is_reported_once_a_cause(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as other:
        guard = Guard(other.pid)
        guard.close()
        start = guard._start
        for code in (errno.EAGAIN, errno.EAGAIN, errno.ENOMEM, errno.ENOMEM):
            monkeypatch.setattr(guard, "_start", Mock(side_effect=OSError(code, os.strerror(code))))
            guard.renew()
        monkeypatch.setattr(guard, "_start", start)
        guard.renew()
        guard.close()
        other.kill()
    gone = "warning: the guard's process is gone, and another cannot be started"
    assert capsys.readouterr().err.splitlines() == [
        f"{gone} ({os.strerror(errno.EAGAIN)})",
        f"{gone} ({os.strerror(errno.ENOMEM)})",
        "warning: the guard's process was gone; another was started",
    ]


def guards_of(supervisor: int) -> list[int]:
    """Its living children that ignore signals by now."""

    def found() -> list[int]:
        return [child for child in children(supervisor) if is_running(child) and ignored(child) >= SENT_FIRST]

    wait_for(lambda: bool(found()))
    return found()


def ignored(pid: int) -> set[int]:
    """Signals that a process ignores."""
    lines = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    mask = int(lines["SigIgn"], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def test_a_group_whose_number_was_given_anew_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as other:
        name = server_name(other.pid)
        end_group_of(f"{name}0")
        assert other.poll() is None
        end_group_of(name)
        assert other.wait(IN_TIME_S) == -signal.SIGKILL


def test_a_process_that_nobody_has_asked_after_is_gone() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        name = server_name(process.pid)
        assert process_of(name) == process.pid
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_of(name) is None
    assert process_of(name) is None
    assert process_of("triton-omni") is None
