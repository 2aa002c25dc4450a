# SPDX-License-Identifier: Apache-2.0
"""Waits and locks of tritonserver that outlive a stage that stands still or dies, and those of others, as ever."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from triton_omni.supervisor.native import SCRATCH_VARIABLE, STALL_GUARD_SOURCE, build_library, compiler

STALL_LIMIT_S, SHORT_STALL_LIMIT_S = 3600.0, 1.0
WAIT_S = 0.1
# Waits `seconds` for a semaphore that is posted after `posted`, if it is; says what came of it, and after how long.
# A stage is a process that the thread that waits has started, and waited for once before. There were `starts` of them,
# and the last one is what `stage_is` says.
WAITING = """
import ctypes, json, os, signal, sys, threading, time
seconds, posted, with_dead_child, starts, stage_is = json.loads(sys.argv[1])
class Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]
libc = ctypes.CDLL(None, use_errno=True)
def make_semaphore():
    made = ctypes.create_string_buffer(64)
    libc.sem_init(made, 0, 0)
    return made
def wait(semaphore):
    until = time.time() + seconds
    return libc.sem_timedwait(semaphore, ctypes.byref(Time(int(until), int(until % 1 * 1e9))))
def end(stage, how):
    os.kill(stage, signal.SIGKILL)
    os.waitid(os.P_PID, stage, os.WEXITED | how)
def start(semaphore):
    stage = os.fork()
    if stage == 0:
        signal.alarm(60)
        signal.pause()
    libc.sem_post(semaphore)
    assert wait(semaphore) == 0
    return stage
semaphores = [make_semaphore() for _ in range(max(starts, 1))]
for number, semaphore in enumerate(semaphores[:starts]):
    stage = start(semaphore)
    if number < starts - 1:
        end(stage, 0)
if stage_is == "dying":
    threading.Timer(0.3, end, [stage, os.WNOWAIT]).start()
if stage_is == "dying and collected":
    threading.Timer(0.3, end, [stage, 0]).start()
if stage_is == "collected":
    end(stage, 0)
if with_dead_child:
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
begin = time.monotonic()
if posted:
    threading.Timer(posted, libc.sem_post, [semaphores[-1]]).start()
result = wait(semaphores[-1])
print(json.dumps([result, ctypes.get_errno(), time.monotonic() - begin]))
if stage_is == "alive":
    end(stage, 0)
"""
# The result of a lock whose owner has died, and if that is 0, its result the next time.
DEAD_OWNER = """
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int after_the_owner_s_death(int in_time) {
    pthread_mutex_t *mutex = mmap(0, sizeof *mutex, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    struct timespec until;
    pthread_mutexattr_t robust;
    pthread_mutexattr_init(&robust);
    pthread_mutexattr_setpshared(&robust, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&robust, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(mutex, &robust);
    pid_t owner = fork();
    if (owner == 0) {
        pthread_mutex_lock(mutex);
        _exit(0);
    }
    waitpid(owner, 0, 0);
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 5;
    int result = in_time ? pthread_mutex_timedlock(mutex, &until) : pthread_mutex_lock(mutex);
    pthread_mutex_unlock(mutex);
    return result != 0 ? result : pthread_mutex_lock(mutex);
}

int lock(void) { return after_the_owner_s_death(0); }
int lock_in_time(void) { return after_the_owner_s_death(1); }
"""
LOCKING = "import ctypes, sys; print(getattr(ctypes.CDLL(sys.argv[1]), sys.argv[2])())"
EOWNERDEAD = 130
MAKING_A_FOLDER = """
#include <limits.h>
#include <stdlib.h>
#include <string.h>

int make(const char *path) {
    char template[PATH_MAX + 1];
    strcpy(template, path);
    return mkdtemp(template) == NULL;
}
"""
CALLING_FOR_A_FOLDER = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).make(sys.argv[2].encode()))"


# Triton's functions, as far as a frontend calls them for a request's priority, and what it then hears.
TRITON = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

void *TRITONSERVER_InferenceRequestSetPriorityUInt64(void *request, uint64_t priority) {
    printf("set %lu\\n", (unsigned long)priority);
    return NULL;
}

void *TRITONSERVER_ErrorNew(int code, const char *text) {
    printf("%d %s\\n", code, text);
    return NULL;
}
"""
FRONTEND = """
#include <stdint.h>
#include <stdlib.h>

void *TRITONSERVER_InferenceRequestSetPriorityUInt64(void *, uint64_t);

int main(int count, char **arguments) {
    TRITONSERVER_InferenceRequestSetPriorityUInt64(NULL, strtoull(arguments[count - 1], NULL, 10));
    return 0;
}
"""


def build(folder: Path, stall_limit_s: float) -> Path:
    return build_library(STALL_GUARD_SOURCE, folder, STALL_LIMIT_MS=round(stall_limit_s * 1000))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its limit is longer than any test."""
    return build(tmp_path_factory.mktemp("native"), STALL_LIMIT_S)


def wait(
    library: Path, name: str, *, posted: float = 0.0, with_dead_child: bool = False, starts: int = 0, stage_is: str = ""
) -> tuple[int, int, float]:
    """Result, errno and seconds of a wait in a process of this name."""
    command = [name, "-c", WAITING, json.dumps([WAIT_S, posted, with_dead_child, starts, stage_is])]
    environment = {"LD_PRELOAD": str(library)}
    how = {"executable": sys.executable, "env": environment}
    done = subprocess.run(command, check=False, capture_output=True, text=True, **how)
    assert done.returncode == 0, done.stderr
    result, errno, seconds = json.loads(done.stdout)
    return result, errno, seconds


def test_the_server_goes_on_waiting_for_a_stage_that_stands_still(library: Path) -> None:
    result, _, seconds = wait(library, "tritonserver", posted=0.7)
    assert result == 0
    assert seconds > 0.6


def test_the_wait_ends_at_the_stall_limit(tmp_path: Path) -> None:
    result, errno, seconds = wait(build(tmp_path, SHORT_STALL_LIMIT_S), "tritonserver")
    assert (result, errno) == (-1, 110)
    assert seconds >= WAIT_S + SHORT_STALL_LIMIT_S - 0.1


def test_nobody_waits_once_a_child_has_ended(library: Path) -> None:
    result, errno, _ = wait(library, "tritonserver", with_dead_child=True)
    assert (result, errno) == (-1, 110)


@pytest.mark.parametrize("stage_is", ["dying", "dying and collected", "collected"])
def test_nobody_waits_for_a_stage_that_has_ended(library: Path, stage_is: str) -> None:
    """This holds if its end was asked for meanwhile, or before, after which it is no child any more."""
    result, errno, _ = wait(library, "tritonserver", starts=1, stage_is=stage_is)
    assert (result, errno) == (-1, 110)


@pytest.mark.parametrize("starts", [1, 100])
def test_a_stage_that_lives_is_waited_for_though_another_has_ended(library: Path, starts: int) -> None:
    """However often stages were started before: Triton never collects one that died with open requests."""
    result, _, seconds = wait(
        library, "tritonserver", posted=0.7, with_dead_child=True, starts=starts, stage_is="alive"
    )
    assert result == 0
    assert seconds > 0.6


def test_other_programs_time_out_as_ever(library: Path) -> None:
    """A stage inherits what is preloaded, and its locks have time-outs that are meant."""
    result, errno, _ = wait(library, "python3")
    assert (result, errno) == (-1, 110)


@pytest.mark.parametrize("process", ["tritonserver", "python3"])
@pytest.mark.parametrize("caller", ["libtriton_python.so", "libtriton_other.so"])
@pytest.mark.parametrize("how", ["lock", "lock_in_time"])
def test_only_the_server_s_python_backend_takes_locks_over_from_the_dead(
    library: Path, tmp_path: Path, how: str, caller: str, process: str
) -> None:
    backend = tmp_path / caller
    compiling = [*compiler(), "-shared", "-fPIC", "-xc", "-", "-o", str(backend), "-pthread"]
    subprocess.run(compiling, input=DEAD_OWNER, check=True, text=True)
    command = [process, "-c", LOCKING, str(backend), how]
    environment = {"LD_PRELOAD": str(library)}
    done = subprocess.run(
        command, check=False, executable=sys.executable, env=environment, capture_output=True, text=True
    )
    its_own = (process, caller) == ("tritonserver", "libtriton_python.so")
    assert (done.stdout, done.stderr) == (f"{0 if its_own else EOWNERDEAD}\n", "")


@pytest.mark.parametrize("priority", [0, 1, 2**64 - 1])
def test_a_priority_that_triton_would_drop_is_refused_by_name(library: Path, tmp_path: Path, priority: int) -> None:
    triton, frontend = tmp_path / "libtritonserver.so", tmp_path / "tritonserver"
    for source, flags in (
        (TRITON, ["-shared", "-fPIC", "-o", str(triton)]),
        (FRONTEND, ["-o", str(frontend), str(triton)]),
    ):
        subprocess.run([*compiler(), "-xc", "-", "-xnone", *flags], input=source, check=True, text=True)
    environment = {"LD_PRELOAD": str(library)}
    done = subprocess.run([frontend, str(priority)], check=True, env=environment, capture_output=True, text=True)
    refused = (
        "3 priority: this parameter of Triton's is not taken, give a priority from -100 to 100 in sampling_parameters "
        "[omni:bad_request]"
    )
    assert done.stdout == (f"{refused}\n" if priority else "set 0\n")


@pytest.mark.parametrize("process", ["tritonserver", "python3"])
@pytest.mark.parametrize("caller", ["libtriton_python.so", "libtriton_other.so"])
def test_only_the_server_s_python_backend_makes_its_folder_where_the_supervisor_says(
    library: Path, tmp_path: Path, caller: str, process: str
) -> None:
    backend, scratch, elsewhere = tmp_path / caller, tmp_path / "scratch", tmp_path / "elsewhere"
    scratch.mkdir()
    elsewhere.mkdir()
    compiling = [*compiler(), "-shared", "-fPIC", "-xc", "-", "-o", str(backend)]
    subprocess.run(compiling, input=MAKING_A_FOLDER, check=True, text=True)
    command = [process, "-c", CALLING_FOR_A_FOLDER, str(backend), f"{elsewhere}/python_env_XXXXXX"]
    environment = {"LD_PRELOAD": str(library), SCRATCH_VARIABLE: str(scratch)}
    subprocess.run(command, check=True, executable=sys.executable, env=environment)
    its_own = (process, caller) == ("tritonserver", "libtriton_python.so")
    assert [len(list(folder.glob("python_env_*"))) for folder in (scratch, elsewhere)] == [its_own, not its_own]


def test_a_name_that_the_backend_s_buffer_has_no_room_for_is_left_alone(library: Path, tmp_path: Path) -> None:
    backend = tmp_path / "libtriton_python.so"
    compiling = [*compiler(), "-shared", "-fPIC", "-xc", "-", "-o", str(backend)]
    subprocess.run(compiling, input=MAKING_A_FOLDER, check=True, text=True)
    command = ["tritonserver", "-c", CALLING_FOR_A_FOLDER, str(backend), f"{tmp_path}/python_env_XXXXXX"]
    environment = {"LD_PRELOAD": str(library), SCRATCH_VARIABLE: "/" + "x" * 4090}
    subprocess.run(command, check=True, executable=sys.executable, env=environment)
    assert len(list(tmp_path.glob("python_env_*"))) == 1
