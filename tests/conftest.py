# SPDX-License-Identifier: Apache-2.0
"""Fixtures of every test folder: the tiny synthetic checkpoint, made once and kept in the repository's cache folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from triton_omni.checkpoint.torchvision_ops import define_torchvision_operators

# Before any test module imports transformers' vision code.
define_torchvision_operators()


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Path:
    """Folder of the tiny synthetic checkpoint in HF's format; do not write into it."""
    from triton_omni.checkpoint.synthetic import ensure_tiny

    return ensure_tiny()
