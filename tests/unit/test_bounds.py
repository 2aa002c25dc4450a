# SPDX-License-Identifier: Apache-2.0
"""The library that bounds Triton's front ends: how it is had, and that it reaches no stage; `server/` tries it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from triton_omni.supervisor import native
from triton_omni.supervisor.machine import ServerError
from triton_omni.supervisor.native import BOUNDS_SOURCE, build_library, compiler, with_bounds
from triton_omni.supervisor.served_repository import thinker_limits

BODY_BYTES = 1 << 20
TOLD = "import json, os; print(json.dumps(os.environ.get('LD_PRELOAD', '').strip(':')))"
FAILING = """
extern void *TRITONSERVER_ErrorNew(int code, const char *message);
const char *fail(const char *message) { return TRITONSERVER_ErrorNew(3, message); }
"""
TRITON = """
#include <string.h>
const char *TRITONSERVER_ErrorNew(int code, const char *message) { return (void)code, strdup(message); }
"""
FAIL = """
import ctypes, sys
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
library = ctypes.CDLL(sys.argv[2])
library.fail.restype = ctypes.c_char_p
print(library.fail(sys.argv[3].encode()).decode())
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(BOUNDS_SOURCE, tmp_path_factory.mktemp("native"), BODY_BYTES=BODY_BYTES)


def run(process: str, library: Path, *arguments: str, preload: str = "") -> str:
    """Return the output of a Python process of this name."""
    environment = {**os.environ, "LD_PRELOAD": preload or str(library)}
    command = [process, "-c", *arguments]
    done = subprocess.run(command, executable=sys.executable, env=environment, check=True, capture_output=True)
    return done.stdout.decode().strip()


def compiled(source: str, name: Path) -> str:
    command = [*compiler(), "-shared", "-fPIC", "-xc", "-", "-o", str(name)]
    subprocess.run(command, input=source, check=True, text=True)
    return str(name)


@pytest.fixture
def thinker(tmp_path: Path) -> Path:
    """A repository's settings of the thinker."""
    path = tmp_path / "repository" / "thinker" / "1" / "stage.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("")
    return path


@pytest.mark.parametrize("others", [[], ["/lib/first.so"], ["/lib/first.so", "/lib/second.so"]])
def test_stages_inherit_what_else_is_preloaded_and_not_this(library: Path, others: list[str]) -> None:
    for place in range(len(others) + 1):
        preload = ":".join([*others[:place], str(library), *others[place:]])
        inherited = json.loads(run("tritonserver", library, TOLD, preload=preload))
        assert [path for path in inherited.split(":") if path] == others


def test_another_program_keeps_what_is_preloaded(library: Path) -> None:
    assert json.loads(run("python3", library, TOLD)) == str(library)


@pytest.mark.parametrize("name", ["libtriton_python.so", "libother.so"])
def test_errors_of_the_python_backend_name_none_of_its_regions(library: Path, tmp_path: Path, name: str) -> None:
    triton, backend = compiled(TRITON, tmp_path / "libtriton.so"), compiled(FAILING, tmp_path / name)
    said = "no room for key 'triton_omni_0-1-2_ab_3-4' and triton_omni_x/, see triton_omni"
    told = run("tritonserver", library, FAIL, triton, backend, said, preload=f"{library}:{triton}")
    assert told == ("no room for key '' and /, see triton_omni" if name == "libtriton_python.so" else said)


def test_the_limit_is_compiled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "cache_folder", lambda: tmp_path)
    assert with_bounds({}, BODY_BYTES)["LD_PRELOAD"] != with_bounds({}, 88 << 20)["LD_PRELOAD"]


def test_the_limit_is_the_thinker_s(thinker: Path, tmp_path: Path) -> None:
    assert thinker_limits(tmp_path).max_body_bytes == 88 << 20
    thinker.write_text(f"limits: {{max_body_bytes: {BODY_BYTES}}}")
    assert thinker_limits(thinker.parents[2]).max_body_bytes == BODY_BYTES


@pytest.mark.parametrize("found", [0, (1 << 20) - 1, (1 << 30) + 1, "many"])
def test_an_impossible_limit_is_refused(thinker: Path, found: object) -> None:
    thinker.write_text(f"limits: {{max_body_bytes: {found}}}")
    with pytest.raises(ServerError, match=r"stage\.yaml: limits\.max_body_bytes"):
        thinker_limits(thinker.parents[2])
