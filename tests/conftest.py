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

import psutil
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

# The time of one example depends on the machine's other work; `pytest-timeout` ends a test that hangs.
settings.register_profile("without a deadline", deadline=None)
settings.load_profile("without a deadline")

# A shell's `&` has a command ignore Ctrl-C, `nohup` has it ignore SIGHUP, and so all that it starts.
# Some of the tests' programs are to end by them.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)


WITH_A_SERVER = "tests/server/"
"""The folder of tests that need a server, most of them the same one: one worker runs them all."""
LIGHT = "tests/reference/"
"""The folder of tests that need no server, and little memory without a GPU."""
LONGEST = "tests/reference/test_kernels_compile.py"
"""The longest of these modules. It begins first of them, so that no worker waits for it in the end."""
WITH_THE_TALKER = "tests/reference/talker/"
"""The folder of tests that share HF's codes, which it takes long to ask for, and engines."""
ON_THE_SHARED_SERVER = {
    f"{WITH_A_SERVER}test_{name}"
    for name in (
        "calling.py",
        "contract.py",
        "control.py",
        "conversation_bench.py",
        "evaluate.py",
        "examples.py",
        "failures.py",
        "gateway.py",
        "hostile.py",
        "idle.py",
        "metadata.py",
        "micro_served.py",
        "mixed_media.py",
        "overload.py::test_a_closed_loop_of_as_many_clients_as_sessions_is_never_refused",
        "overload.py::test_refused_requests_leave_none_of_their_bytes",
        "perf_analyzer.py",
        "perf_input.py",
        "reference.py",
        "replicas.py",
        "request_parameters.py",
        "sessions.py",
        "shared_media.py",
        "start.py",
        "direct_calls_of_stages.py",
        "surface.py",
        "tools.py",
    )
}
"""Modules that need the shared server alone. Others start servers beside it or load it, which takes more memory beside
three workers' engines than a machine of 24 GB has."""
WITH_SERVERS_OF_THEIR_OWN = {
    f"{WITH_A_SERVER}test_{name}"
    for name in (
        "bounds.py",
        "cached_turns.py",
        "compare.py",
        "kept_memory.py",
        "observability.py",
        "restart.py",
        "smoke.py",
        "soak.py",
        "whole_restart.py",
    )
}
"""Modules that any worker may run, since they do not use the shared server."""
WITH_MINI = ("tests/frameworks/", f"{WITH_A_SERVER}test_mini.py")
"""The tests that share a server of the default checkpoint."""
FIRST, LAST = "tests with the shared server", "tests with servers beside the shared one"


def scope_of(nodeid: str) -> str:
    """Return what one worker runs as a whole: a module, whose fixtures are dear, or modules that share more."""
    module, _, function = nodeid.partition("[")[0].partition("::")
    if module.startswith(WITH_THE_TALKER):
        return WITH_THE_TALKER
    if not module.startswith((WITH_A_SERVER, *WITH_MINI)):
        return module
    # On a GPU all of them come last: vLLM's engines of the other tests need its memory.
    if torch.cuda.is_available():
        return LAST
    if module.startswith(WITH_MINI):
        return WITH_MINI[0]
    if module in WITH_SERVERS_OF_THEIR_OWN:
        return module
    return FIRST if {module, f"{module}::{function}"} & ON_THE_SHARED_SERVER else LAST


def is_light(scope: str) -> bool:
    """Return True if it may run beside the last tests, which leave it little memory and processor time."""
    return scope.startswith(LIGHT) and not torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In the order in which workers take them."""

    def turn(item: pytest.Item) -> tuple[int, bool]:
        scope = scope_of(item.nodeid)
        return {FIRST: 0, LAST: 3}.get(scope, 1 + is_light(scope)), scope != LONGEST

    items.sort(key=turn)


class _Worker:
    """State of this process, if it is one of several that run tests."""

    has_server = "PYTEST_XDIST_WORKER" not in os.environ


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """From its first light test on a worker without the server takes what others leave: only light ones follow."""
    scope = scope_of(item.nodeid)
    if scope in (FIRST, LAST):
        _Worker.has_server = True
    elif is_light(scope) and not _Worker.has_server:
        os.setpriority(os.PRIO_PROCESS, 0, 19)


_COLLECTED = pytest.StashKey[int]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Test modules import what they need."""
    all_is_imported()
    session.config.stash[_COLLECTED] = psutil.Process().memory_info().rss


@pytest.fixture
def collected_bytes(pytestconfig: pytest.Config) -> int:
    """Main memory of this process before its first test."""
    return pytestconfig.stash[_COLLECTED]


def pytest_unconfigure() -> None:
    """The last of all."""
    all_has_ended()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Workers share out the scopes; the first of them has the shared server, and runs all tests that need it.

    It runs the last ones once the others have light tests alone. A fourth has light tests from the start, with what the
    other three leave of the processors while they wait.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        _filler: Any = None
        """The worker with light tests alone, where there are enough workers."""

        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

        def schedule(self) -> None:
            if self.collection is None and len(self.nodes) > 3:
                self._filler = self.nodes[-1]
            super().schedule()

        def _assign_work_unit(self, node: Any) -> None:
            waiting = [scope for scope in self.workqueue if scope != LAST and self._may_run(node, scope)]
            keeps_server = node is self._keeper()
            if keeps_server and LAST in self.workqueue and all(map(is_light, [*waiting, *self._of_others(node)])):
                self.workqueue.move_to_end(LAST, last=False)
            elif waiting:
                self.workqueue.move_to_end(waiting[0], last=False)
            else:
                if not keeps_server:
                    node.shutdown()
                return
            super()._assign_work_unit(node)

        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            super().mark_test_complete(node, item_index, duration)
            if LAST in self.workqueue and (keeper := self._keeper()):
                self._reschedule(keeper)

        def _may_run(self, node: Any, scope: str) -> bool:
            return node is not self._filler or is_light(scope)

        def _keeper(self) -> Any:
            """The worker with the server: the first that is not on its way out."""
            return next((node for node in self.nodes if not node.shutting_down), None)

        def _of_others(self, node: Any) -> list[str]:
            """Scopes that other workers have not done."""
            others = [units for other, units in self.assigned_work.items() if other is not node]
            return [scope for units in others for scope, tests in units.items() if not all(tests.values())]

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
