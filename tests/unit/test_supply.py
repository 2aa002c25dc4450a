# SPDX-License-Identifier: Apache-2.0
"""Code and packages: no source unpickles or evaluates anything; locked packages have versions and hashes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    file
    for folder in ("backend_src", "client", "gateway", "model_repository", "scripts", "examples")
    for file in sorted((ROOT / folder).rglob("*.py"))
    if "build" not in file.parts
]
DOCKERFILE = ROOT / "Dockerfile"
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
RESTRICTED = {
    Path("backend_src/triton_omni/checkpoint/voice_names.py"): {"pickle"},
    Path("backend_src/triton_omni/checkpoint/speakers.py"): {"pickle"},
    Path("backend_src/triton_omni/request/media/killable.py"): {"pickle"},
}
"""Files that may import one of these: for unpicklers of plain values or media alone, which have their own tests."""
DEVELOPMENT = ROOT / "requirements" / "dev.in"
NEEDED_BY_SERVING = {"httpx", "nvidia-ml-py", "openai", "soundfile"}
"""Development packages that serving needs too."""
BY_VERSION_ALONE = {"torch", "torchvision"}
"""Every index has its own builds of these."""


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 150
    assert len(LOCKS) == 9


def test_the_image_is_built_on_a_triton_that_no_known_request_ends() -> None:
    """Nested JSON ends those up to 26.03, a header 26.06 to 26.08, many chunks those up to 26.04 (docs/limits.md)."""
    (release,) = re.findall(
        r"^ARG BASE=nvcr\.io/nvidia/tritonserver:(\d\d\.\d\d)-", DOCKERFILE.read_text(), re.MULTILINE
    )
    assert release >= "26.05"
    assert release not in {"26.06", "26.07", "26.08"}


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_source_runs_what_it_reads(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    name = file.relative_to(ROOT)
    assert imported(tree) & UNPICKLERS <= RESTRICTED.get(name, set())
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        assert is_harmless(call), f"{name}:{call.lineno}: {ast.unparse(call)[:80]}"


def imported(tree: ast.Module) -> set[str]:
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {module.partition(".")[0] for module in found}


def is_harmless(call: ast.Call) -> bool:
    """Not an unrestricted `torch.load`, a YAML loader that builds objects, a shell, or code from a string."""
    called = ast.unparse(call.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if called == "torch.load":
        return given.get("weights_only") == "True"
    if called in ("np.load", "numpy.load"):
        return given.get("allow_pickle", "False") == "False"
    if called.startswith("yaml.") and "load" in called:
        return called in ("yaml.safe_load", "yaml.safe_load_all")
    return called not in ("eval", "exec", "os.system", "os.popen") and given.get("shell", "False") == "False"


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, yaml.Loader)",
        "yaml.unsafe_load(text)",
        "subprocess.run(text, shell=True)",
        "eval(text)",
    ],
)
def test_what_is_looked_for_is_found(line: str) -> None:
    (call,) = [node for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Call)]
    assert not is_harmless(call)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda file: file.name)
def test_every_locked_package_has_a_version_and_a_hash(lock: Path) -> None:
    entries = list(packages(lock))
    assert entries
    for entry in entries:
        name = re.match(r"([\w.-]+)==[^\s;]+", entry)
        assert name, entry
        assert ("--hash=sha256:" in entry) or name[1] in BY_VERSION_ALONE, entry


def packages(lock: Path) -> Iterator[str]:
    """Each package's lines, joined."""
    joined = lock.read_text(encoding="utf-8").replace("\\\n", " ")
    return (line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#"))


def names(lock: Path) -> set[str]:
    return {entry.partition("==")[0] for entry in packages(lock)}


def test_the_image_installs_no_development_tool() -> None:
    """Neither does a CPU's lock hold one, which is the GPU's with another build of vLLM."""
    installed = [ROOT / name for name in re.findall(r"requirements/\w+\.lock", DOCKERFILE.read_text(encoding="utf-8"))]
    assert ROOT / "requirements" / "gpu.lock" in installed
    tools = {entry.lower() for entry in packages(DEVELOPMENT)} - NEEDED_BY_SERVING
    assert tools >= {"hypothesis", "mypy", "pytest", "pytest-xdist", "ruff", "types-pyyaml"}
    for lock in [*installed, ROOT / "requirements" / "cpu.lock"]:
        assert not tools & names(lock), lock.name


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_development_tools_fit_the_locks_they_are_installed_beside(platform: str) -> None:
    """One environment has both, so no package may have two versions."""
    versions = [
        dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "requirements" / f"{name}.lock").read_text(), re.MULTILINE))
        for name in (platform, "dev")
    ]
    shared = versions[0].keys() & versions[1].keys()
    assert "numpy" in shared
    assert {name: versions[0][name] for name in shared} == {name: versions[1][name] for name in shared}
