# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests against HF: one oracle a session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from reference.hf import HfReference


@pytest.fixture(autouse=True)
def _reference_in_full_float32() -> None:
    """On the CPU no product rounds its inputs, whatever an engine in this process has asked for."""
    for kind in (torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv, torch.backends.mkldnn.rnn):
        kind.fp32_precision = "ieee"


@pytest.fixture(scope="session")
def hf(tiny_checkpoint: Path) -> HfReference:
    """HF's model of the tiny checkpoint, in float32 on the CPU."""
    return HfReference(tiny_checkpoint)


@pytest.fixture
def untraced() -> Iterator[None]:
    """Keeps coverage out of the interpreter of the Triton language, which runs for twice as long under it."""
    tracer = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(tracer)
