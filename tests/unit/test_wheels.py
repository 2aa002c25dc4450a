# SPDX-License-Identifier: Apache-2.0
"""The wheels of client and gateway: they hold all files, and work beside what they ask for and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
BUILD = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
# No site-packages, no variables: the folders given are all that there is beside Python's own modules.
USE = """
import importlib, importlib.metadata, importlib.util, pkgutil, sys

package, script, *sys.path[:0] = sys.argv[1:]
assert importlib.util.find_spec("torch") is importlib.util.find_spec("triton_omni") is None
for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
(entry,) = importlib.metadata.entry_points(group="console_scripts", name=script)
sys.argv = [script, "--help"]
entry.load()()
"""
OURS = {"triton-omni-client": "client", "triton-omni-gateway": "gateway"}
SCRIPTS = {"client": ("triton_omni_client", "triton-omni"), "gateway": ("triton_omni_gateway", "triton-omni-gateway")}


def build(folder: str, target: Path) -> Path:
    """The wheel's files, built without a network."""
    source = target / "source"
    shutil.copytree(ROOT / folder, source, ignore=shutil.ignore_patterns("*.egg-info", "build", "__pycache__"))
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "importable" not in done.stderr  # so setuptools warns of a folder that it would leave out one day
    with zipfile.ZipFile(target / done.stdout.split()[-1]) as wheel:
        wheel.extractall(target / "wheel")
    return target / "wheel"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with the contents of each wheel."""
    return {folder: build(folder, tmp_path_factory.mktemp(folder)) for folder in SCRIPTS}


Found = dict[tuple[str, str], Distribution]
"""Required distributions by name and extra."""


def add_needed(needs: Distribution, extra: str, ours: dict[str, Distribution], found: Found) -> None:
    """Add what a distribution with this extra asks for, and what that asks for; ours are as they were built."""
    for asked in map(Requirement, needs.requires or ()):
        if asked.marker is not None and not asked.marker.evaluate({"extra": extra}):
            continue
        other = ours.get(asked.name) or distribution(asked.name)
        for its_extra in {"", *asked.extras} - {extra for name, extra in found if name == asked.name}:
            found[asked.name, its_extra] = other
            add_needed(other, its_extra, ours, found)


def link_dependencies(name: str, ours: dict[str, Distribution], folder: Path) -> None:
    """Make links in `folder` to all that a distribution of ours asks for, and to nothing else."""
    found: Found = {}
    add_needed(ours[name], "", ours, found)
    files = {file for other in found.values() for file in other.files or () if file.parts[0] != ".."}
    for part, file in {file.parts[0]: file for file in files}.items():
        (folder / part).symlink_to(str(file.locate()).removesuffix(str(file)) + part)


@pytest.mark.parametrize("folder", SCRIPTS)
def test_a_wheel_holds_every_file_of_its_package(wheels: dict[str, Path], folder: str) -> None:
    package, _ = SCRIPTS[folder]
    source, packed = ROOT / folder / package, wheels[folder] / package
    files = {
        path.relative_to(source) for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert {path.relative_to(packed) for path in packed.rglob("*") if path.is_file()} == files
    assert Path("py.typed") in files


@pytest.mark.parametrize(("name", "folder"), OURS.items())
def test_a_wheel_works_beside_what_it_asks_for_and_nothing_else(
    wheels: dict[str, Path], name: str, folder: str, tmp_path: Path
) -> None:
    ours = {other: next(iter(distributions(path=[str(wheels[where])]))) for other, where in OURS.items()}
    link_dependencies(name, ours, tmp_path)
    command = [sys.executable, "-I", "-S", "-c", USE, *SCRIPTS[folder], str(wheels[folder]), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()
