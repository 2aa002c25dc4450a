# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests against HF: one oracle a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from reference.hf import HfReference


@pytest.fixture(scope="session")
def hf(tiny_checkpoint: Path) -> HfReference:
    """HF's model of the tiny checkpoint, in float32 on the CPU."""
    return HfReference(tiny_checkpoint)
