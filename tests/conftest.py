# SPDX-License-Identifier: Apache-2.0
"""Fixtures of every test folder: the tiny synthetic checkpoint, made once and kept in the repository's cache folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from importing import all_has_ended, all_is_imported

# One thread for the tiny networks, said before torch is loaded: several wait for each other at every operation, which
# beside a server on the same few cores took a test from 4 s to 186 s.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

if not torch.cuda.is_available():
    # Kernels in the Triton language then run in its interpreter; it must be said before anything imports it.
    os.environ["TRITON_INTERPRET"] = "1"

from triton_omni.checkpoint.torchvision_ops import define_torchvision_operators

# Before any test module imports transformers' vision code.
define_torchvision_operators()


WITH_A_SERVER = "tests/server/"
"""The folder of tests that need a server, most of them the same one: one worker runs them all."""
UNHURRIED = {
    f"{WITH_A_SERVER}test_{name}.py"
    for name in (
        "calling",
        "compare",
        "contract",
        "control",
        "deterministic",
        "examples",
        "failures",
        "gateway",
        "hostile",
        "metadata",
        "mixed_media",
        "perf_input",
        "reference",
        "sessions",
        "shared_media",
        "start",
    )
}
"""Modules of that folder that pass however slow the machine is. The others look at the clock: they come when no other
worker has anything left to do."""
FIRST, LAST = "tests with a server", "tests with a server and a clock"


def scope_of(nodeid: str) -> str:
    """What one worker runs as a whole: a module, whose fixtures are dear, or the modules that share a server."""
    module = nodeid.partition("::")[0]
    if not module.startswith(WITH_A_SERVER):
        return module
    # On a GPU all of them come last: vLLM's engines of the other tests need its memory.
    return FIRST if module in UNHURRIED and not torch.cuda.is_available() else LAST


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In the order in which the workers take them."""
    order = {FIRST: 0, LAST: 2}
    items.sort(key=lambda item: order.get(scope_of(item.nodeid), 1))


def pytest_collection_finish() -> None:
    """Test modules import what they need."""
    all_is_imported()


def pytest_unconfigure() -> None:
    """The last of all."""
    all_has_ended()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Workers share out the scopes; the first worker has the server and runs what needs it, from the start and last."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            if not self._is_time_for_the_last():
                super()._assign_work_unit(node)
            elif node is not self._keeper():
                node.shutdown()
            elif not any(self._pending_of(self.assigned_work[other]) for other in self.nodes if other is not node):
                super()._assign_work_unit(node)

        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            super().mark_test_complete(node, item_index, duration)
            if self._is_time_for_the_last() and (keeper := self._keeper()):
                self._reschedule(keeper)

        def _is_time_for_the_last(self) -> bool:
            return next(iter(self.workqueue), None) == LAST

        def _keeper(self) -> Any:
            """The worker with the server: the first that is not on its way out."""
            return next((node for node in self.nodes if not node.shutting_down), None)

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Path:
    """Folder of the tiny synthetic checkpoint in HF's format; do not write into it."""
    from triton_omni.checkpoint.synthetic import ensure_checkpoint

    return ensure_checkpoint()
