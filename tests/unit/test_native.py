# SPDX-License-Identifier: Apache-2.0
"""The libraries that are preloaded into tritonserver: compiled once, and a warning where they cannot be had."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from triton_omni.supervisor import native
from triton_omni.supervisor.native import SCRATCH_VARIABLE, NativeError, build_library, with_bounds, with_stall_guard

Adding = Callable[[Mapping[str, str]], dict[str, str]]
SCRATCH = Path("/scratch")
ADDING: list[tuple[Adding, str]] = [
    (lambda environment: with_bounds(environment, 1 << 20), "each caller can end the server"),
    (
        lambda environment: with_stall_guard(environment, SCRATCH),
        "a stage that stands still or dies may end the server",
    ),
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source" / "some.c"
    path.parent.mkdir()
    path.write_text("int number(void) { return NUMBER; }")
    return path


@pytest.mark.parametrize("add", [add for add, _ in ADDING])
@pytest.mark.parametrize("others", ["/lib/other.so", "/lib/other.so:/lib/third.so", "/lib/a b.so"])
def test_what_was_preloaded_before_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, add: Adding, others: str
) -> None:
    monkeypatch.setattr(native, "cache_folder", lambda: tmp_path)
    library = add({})["LD_PRELOAD"]
    assert Path(library).is_file()
    assert add({"LD_PRELOAD": others})["LD_PRELOAD"] == f"{library}:{others}"


@pytest.mark.parametrize(("add", "what"), ADDING)
def test_without_a_compiler_the_operator_is_told_what_is_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], add: Adding, what: str
) -> None:
    monkeypatch.setattr(native, "cache_folder", lambda: tmp_path)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert add({}) == {}
    told = capsys.readouterr().err
    assert "no C compiler" in told
    assert what in told


def test_the_folder_of_the_python_backend_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "cache_folder", lambda: tmp_path)
    assert with_stall_guard({}, SCRATCH)[SCRATCH_VARIABLE] == str(SCRATCH)


def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Path) -> None:
    library = build_library(source, tmp_path, NUMBER=1)
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert build_library(source, tmp_path, NUMBER=1) == library
    with pytest.raises(NativeError, match="/nowhere/cc"):
        build_library(source, tmp_path, NUMBER=2)


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Path) -> None:
    monkeypatch.setenv("CC", f"{sys.executable} -c 'raise SystemExit(\"no such target\")'")
    with pytest.raises(NativeError, match=r"could not compile some\.c: no such target"):
        build_library(source, tmp_path / "folder", NUMBER=1)
    assert list((tmp_path / "folder").iterdir()) == []
