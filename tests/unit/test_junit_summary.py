# SPDX-License-Identifier: Apache-2.0
"""The summary of a run of tests, from the JUnit XML that pytest itself writes of a small one."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import typer

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "junit_summary.py"))
TESTS = """
import pytest

def test_passes(): pass

class TestClass:
    @pytest.mark.parametrize("number", [1, 2])
    def test_counts(self, number): assert number == 1

@pytest.mark.skip(reason="needs a GPU")
def test_skipped(): pass

@pytest.fixture
def broken(): raise RuntimeError("no device")

def test_without_its_fixture(broken): pass
"""


@pytest.fixture
def report(tmp_path: Path) -> Path:
    folder = tmp_path / "tests" / "reference"
    folder.mkdir(parents=True)
    (folder / "test_small.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=report.xml", "tests"]
    done = subprocess.run([*command, "--rootdir=."], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    return tmp_path / "report.xml"


def test_outcomes_are_told_by_file_and_failures_with_their_tracebacks(
    report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SCRIPT["main"]([report], tmp_path / "summary.json")
    assert capsys.readouterr().out == "2 passed, 2 failed, 1 skipped\n"
    found = json.loads((tmp_path / "summary.json").read_text())
    (file,) = found["files"]
    assert file.endswith("test_small.py")
    counts = {outcome: found["files"][file][outcome] for outcome in ("passed", "failed", "skipped")}
    assert counts == {"passed": 2, "failed": 2, "skipped": 1}
    assert {name.removeprefix(f"{file}::") for name in found["failures"]} == {
        "TestClass::test_counts[2]",
        "test_without_its_fixture",
    }
    assert all("test_small.py" in told for told in found["failures"].values())
    assert "no device" in found["failures"][f"{file}::test_without_its_fixture"]
    assert found["skips"] == {"needs a GPU": 1}
    assert len(found["slowest"]) == 5
    assert found["versions"]["gpu"]
    assert len(found["date"]) == len("2026-11-28")


def test_shares_of_a_run_add_up(report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.xml"
    other.write_text(report.read_text().replace("test_small", "test_other"))
    SCRIPT["main"]([report, other], tmp_path / "summary.json")
    assert capsys.readouterr().out == "4 passed, 4 failed, 2 skipped\n"
    assert [name.rpartition("/")[2] for name in json.loads((tmp_path / "summary.json").read_text())["files"]] == [
        "test_other.py",
        "test_small.py",
    ]


def test_what_a_run_left_unfinished_is_refused(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text("<testsuites><testsuite>")
    with pytest.raises(typer.BadParameter, match=r"report\.xml: .*; give the XML of a run that ended$"):
        SCRIPT["main"]([report], tmp_path / "summary.json")
    assert not (tmp_path / "summary.json").exists()
