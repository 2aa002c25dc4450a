# SPDX-License-Identifier: Apache-2.0
"""Decisions of `build.sh` before it installs anything."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "build.sh"


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment of Python 3.11 that reaches every page."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\ncase "$2" in *version_info*) echo 3.11 ;; esac\n')
    python.chmod(0o755)
    return tmp_path


def function(name: str, venv: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one function of the script, with these variables alone set."""
    *rest, main = SCRIPT.read_text().rstrip().splitlines()
    assert main == 'main "$@"'
    program = venv / "program.sh"
    program.write_text("\n".join([*rest, f"VENV={venv}", name]))
    variables = {"PATH": "/usr/bin:/bin", **environment}
    return subprocess.run(["bash", program], env=variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("wheel", [None, "torch-2.0.0+cpu-cp311-x.whl", "torch-2.0.0+cpu-cp312-x.whl"])
def test_torch_s_cpu_build_is_taken_from_where_it_is(venv: Path, tmp_path: Path, wheel: str | None) -> None:
    """Without wheels of pip's settings, the usual case, it is that of torch's index."""
    environment = {}
    if wheel is not None:
        (tmp_path / wheel).touch()
        environment["UV_FIND_LINKS"] = f"/elsewhere,file://{tmp_path}"
    ended = function("torch_backend", venv, **environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == ("" if wheel and "cp311" in wheel else "--torch-backend=cpu\n")
