# SPDX-License-Identifier: Apache-2.0
"""Fixtures of every test folder: the tiny synthetic checkpoint, made once and kept in the repository's cache folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from importing import all_has_ended, all_is_imported

# One thread for the tiny networks, said before torch is loaded: several wait for each other at every operation, which
# beside a server on the same few cores took a test from 4 s to 186 s.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

    from server.serving import Served

if not torch.cuda.is_available():
    # Kernels in the Triton language then run in its interpreter; it must be said before anything imports it.
    os.environ["TRITON_INTERPRET"] = "1"

from triton_omni.checkpoint.transformers_setup import prepare_transformers

# Before any test module imports transformers' vision code.
prepare_transformers()

# How long one example takes says something of who else uses the machine; `pytest-timeout` ends what hangs.
settings.register_profile("without a deadline", deadline=None)
settings.load_profile("without a deadline")

# A shell's `&` has a command ignore Ctrl-C, `nohup` has it ignore SIGHUP, and so all that it starts.
# Some of the tests' programs are to end by them.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)


WITH_A_SERVER = "tests/server/"
"""The folder of tests that need a server, most of them the same one: one worker runs them all."""
WITH_SERVERS_OF_THEIR_OWN = {
    f"{WITH_A_SERVER}test_{name}.py"
    for name in (
        "bounds",
        "cached_turns",
        "compare",
        "crashes",
        "kept_memory",
        "observability",
        "restart",
        "smoke",
        "soak",
        "whole_restart",
    )
}
"""Of these, what any worker may run beside that one."""
WITH_MINI = ("tests/frameworks/", f"{WITH_A_SERVER}test_mini.py")
"""The tests that share a server of the default checkpoint."""
WITH_THE_TALKER = "tests/reference/talker/"
"""The folder of tests that share HF's codes, which it takes long to ask for, and engines."""
WITHOUT_A_SERVER = "tests/reference/"
"""The folder of tests that compute and wait for nobody."""
LONGEST = "tests/reference/test_kernels_compile.py"
"""Of these. It begins first of them, so that no worker waits for it in the end."""
SHARED_SERVER = "tests with the shared server"


def scope_of(nodeid: str) -> str:
    """What one worker runs as a whole: a module, whose fixtures are dear, or modules that share more."""
    module = nodeid.partition("::")[0]
    if module.startswith(WITH_THE_TALKER):
        return WITH_THE_TALKER
    if not module.startswith((WITH_A_SERVER, *WITH_MINI)):
        return module
    # On a GPU one worker runs all of them: a server has much of its memory.
    if torch.cuda.is_available():
        return SHARED_SERVER
    if module.startswith(WITH_MINI):
        return WITH_MINI[0]
    return module if module in WITH_SERVERS_OF_THEIR_OWN else SHARED_SERVER


def computes(scope: str) -> bool:
    """True if it takes what others leave of the processors."""
    return scope.startswith(WITHOUT_A_SERVER) and not torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In the order in which workers take them: on a CPU the shared server's take longest, on a GPU they come last."""

    def turn(item: pytest.Item) -> tuple[int, bool]:
        scope = scope_of(item.nodeid)
        servers = 3 if torch.cuda.is_available() else 0
        return servers if scope == SHARED_SERVER else 1 + computes(scope), scope != LONGEST

    items.sort(key=turn)


class _Worker:
    """What this process has run, if it is one of several that run tests."""

    has_server = "PYTEST_XDIST_WORKER" not in os.environ


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Give way to the tests with servers from the first test on that computes: only such tests follow."""
    scope = scope_of(item.nodeid)
    if scope == SHARED_SERVER:
        _Worker.has_server = True
    elif computes(scope) and not _Worker.has_server:
        os.setpriority(os.PRIO_PROCESS, 0, 19)


def pytest_collection_finish() -> None:
    """Test modules import what they need."""
    all_is_imported()


def pytest_unconfigure() -> None:
    """The last of all."""
    all_has_ended()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Workers share out the scopes."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Path:
    """Folder of the tiny synthetic checkpoint in HF's format; do not write into it."""
    from triton_omni.checkpoint.synthetic import ensure_checkpoint

    return ensure_checkpoint()


@pytest.fixture(scope="session")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of the default checkpoint, with the settings that are shipped."""
    from server.serving import serve
    from triton_omni.supervisor.model_folder import model_folder

    with serve(tmp_path_factory.mktemp("mini"), model_folder(None), settings={}) as served:
        yield served
        served.stop()
