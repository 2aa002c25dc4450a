# SPDX-License-Identifier: Apache-2.0
"""Fixtures of every test folder: the tiny synthetic checkpoint, made once and kept in the repository's cache folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
"""The folder of tests that look at the clock: one worker runs them, when the others are nearly done."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a server comes last."""
    items.sort(key=lambda item: item.nodeid.startswith(WITH_A_SERVER))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Workers share out modules, whose fixtures are dear; what needs a server is one module to them."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return WITH_A_SERVER if nodeid.startswith(WITH_A_SERVER) else nodeid.partition("::")[0]

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Path:
    """Folder of the tiny synthetic checkpoint in HF's format; do not write into it."""
    from triton_omni.checkpoint.synthetic import ensure_checkpoint

    return ensure_checkpoint()
