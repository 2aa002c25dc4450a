# SPDX-License-Identifier: Apache-2.0
"""The cache lies with the repository, or with the user who installed the code."""

from pathlib import Path

import pytest

from triton_omni.checkpoint.synthetic import default_checkpoint_path
from triton_omni.core import cache_folder as module
from triton_omni.core.cache_folder import cache_folder


def test_in_a_repository_it_lies_there() -> None:
    assert cache_folder() == Path(__file__).parents[2] / ".cache"
    assert default_checkpoint_path().parent == cache_folder() / "checkpoints"


def test_without_a_repository_around_the_code_it_is_the_user_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The container has its code on a read-only file system."""
    installed = tmp_path / "lib" / "python" / "site-packages" / "triton_omni" / "cache_folder.py"
    monkeypatch.setattr(module, "__file__", str(installed))
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder() == Path("/cache/triton-omni")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/omni")
    assert cache_folder() == Path("/home/omni/.cache/triton-omni")
