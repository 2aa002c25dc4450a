# SPDX-License-Identifier: Apache-2.0
"""Fixtures of every test folder: the tiny synthetic checkpoint, made once and kept in the repository's cache folder."""

from __future__ import annotations

import os
from pathlib import Path

# One thread for the tiny networks, said before torch is loaded: several wait for each other at every operation, which
# beside a server on the same few cores took a test from 4 s to 186 s.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

if not torch.cuda.is_available():
    # Kernels in the Triton language then run in its interpreter; it must be said before anything imports it.
    os.environ["TRITON_INTERPRET"] = "1"

from triton_omni.checkpoint.torchvision_ops import define_torchvision_operators

# Before any test module imports transformers' vision code.
define_torchvision_operators()


ALONE = "server"
"""The folder of tests that look at the clock: one worker runs them, after all others."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say what several workers may share out (`--dist loadgroup`): modules, whose fixtures are dear, and `ALONE`."""
    tests = Path(__file__).parent
    folders = {item: item.path.relative_to(tests).parts[0] for item in items}
    items.sort(key=lambda item: folders[item] == ALONE)
    for item in items:
        group = ALONE if folders[item] == ALONE else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Path:
    """Folder of the tiny synthetic checkpoint in HF's format; do not write into it."""
    from triton_omni.checkpoint.synthetic import ensure_checkpoint

    return ensure_checkpoint()
