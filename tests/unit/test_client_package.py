# SPDX-License-Identifier: Apache-2.0
"""The client's package holds all of its modules, and asks for what they import and nothing else."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

CLIENT = Path(__file__).parents[2] / "client"
PROJECT = tomllib.loads((CLIENT / "pyproject.toml").read_text(encoding="utf-8"))
MODULES = {
    "PIL": "pillow",
    "google": "tritonclient",  # protobuf, on which its gRPC part stands
    "grpc": "tritonclient",
    "prometheus_client": "prometheus-client",
    "pynvml": "nvidia-ml-py",
}


def wanted(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[><=]", requirement)[0] for requirement in requirements}


def imports(tree: ast.AST) -> set[str]:
    """Distributions whose modules a piece of code imports, this package and Python's own left out."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module.partition(".")[0])
    return {MODULES.get(name, name) for name in names - set(sys.stdlib_module_names) - {"triton_omni_client"}}


def test_every_folder_is_packaged() -> None:
    folders = {path.parent for path in CLIENT.rglob("*.py") if "build" not in path.parts}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == {
        ".".join(folder.relative_to(CLIENT).parts) for folder in folders
    }


def test_what_is_imported_is_asked_for() -> None:
    project = PROJECT["project"]
    extras = wanted([each for requirements in project["optional-dependencies"].values() for each in requirements])
    needed, somewhere = set(), set()
    for path in (CLIENT / "triton_omni_client").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        somewhere |= imports(tree)
        needed |= imports(ast.Module([node for node in tree.body if not isinstance(node, ast.FunctionDef)], []))
    light = {"numpy", "prometheus-client", "rich", "tenacity", "tritonclient", "typer"}
    assert needed - extras == wanted(project["dependencies"]) == light
    assert somewhere <= light | extras
