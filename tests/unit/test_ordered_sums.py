# SPDX-License-Identifier: Apache-2.0
"""Settings of a GPU's libraries; tests on a GPU show that the libraries keep to them."""

from __future__ import annotations

import os

import pytest
import torch

from triton_omni.core.gpu import use_ordered_sums

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told nothing yet, and nothing any more afterwards."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setenv(VARIABLE, "")


@pytest.mark.parametrize(("device", "told"), [("cpu", (False, "")), ("cuda", (True, ":4096:8"))])
def test_only_a_gpu_s_libraries_are_told_to_order_their_sums(device: str, told: tuple[bool, str]) -> None:
    use_ordered_sums(torch.device(device))
    assert (torch.backends.cudnn.deterministic, os.environ[VARIABLE]) == told
