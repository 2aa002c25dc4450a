# SPDX-License-Identifier: Apache-2.0
"""Imports go one way: core, session, link and request, engines, stages, the programs around Triton, the models."""

import ast
import graphlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BACKEND = ROOT / "backend_src" / "triton_omni"
CLIENT = ROOT / "client" / "triton_omni_client"
GATEWAY = ROOT / "gateway" / "triton_omni_gateway"

# Each module may import modules of lower layers and of its own package.
LAYERS = [
    {"core": {"core"}},
    {"session": {"session"}, "checkpoint": {"checkpoint"}, "policy": {"policy"}},
    {"link": {"link"}, "request": {"request"}, "token2wav": {"token2wav"}},
    {"thinker": {"thinker.prompt"}},
    {"vllm_hooks": {"vllm_hooks"}},
    {"thinker": {"thinker"}, "talker": {"talker"}, "token2wav": {"token2wav.stage", "token2wav.open_session"}},
    {"stub": {"stub"}, "supervisor": {"supervisor"}},
    {"doctor": {"doctor"}},
]


def modules(folder, package):
    return {
        ".".join([package, *path.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__"): path
        for path in sorted(folder.rglob("*.py"))
    }


BACKEND_MODULES = modules(BACKEND, "triton_omni")
CLIENT_MODULES = modules(CLIENT, "triton_omni_client")
GATEWAY_MODULES = modules(GATEWAY, "triton_omni_gateway")
MODEL_FILES = sorted((ROOT / "model_repository").glob("*/1/model.py"))


def imports(path):
    """Full names of all that a file imports, wherever in it, its own package's relative imports left out."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def absolute_imports(module, path):
    """Full names of all that a module imports, relative ones resolved."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    names = imports(path)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return names


def own_imports(path):
    return {name for name in imports(path) if name in BACKEND_MODULES} - {"triton_omni"}


def top_level(path):
    return {name.partition(".")[0] for name in imports(path)}


def place(module):
    """(layer, group) of a module by its longest listed prefix."""
    inner = module.removeprefix("triton_omni.")
    best, found = -1, None
    for layer, groups in enumerate(LAYERS):
        for group, prefixes in groups.items():
            for prefix in prefixes:
                if (inner == prefix or inner.startswith(f"{prefix}.")) and len(prefix) > best:
                    best, found = len(prefix), (layer, group)
    assert found is not None, f"{module} has no place in the layers: list it"
    return found


def importing(package):
    return {module for module, path in BACKEND_MODULES.items() if package in top_level(path)}


def test_the_whole_backend_is_seen():
    seen = {"triton_omni.core.errors", "triton_omni.stub.adapter", "triton_omni.token2wav.stage"}
    assert seen <= set(BACKEND_MODULES)
    assert len(MODEL_FILES) == 4
    assert own_imports(BACKEND / "session" / "loop.py") == {
        f"triton_omni.core.{name}" for name in ("gpu", "logs", "metrics")
    }
    assert "triton_omni.session.ledger" in own_imports(BACKEND / "thinker" / "stage.py")


@pytest.mark.parametrize("module", [module for module in BACKEND_MODULES if module != "triton_omni"])
def test_a_module_imports_lower_layers_and_its_own_group_alone(module):
    layer, group = place(module)
    for name in own_imports(BACKEND_MODULES[module]):
        other_layer, other_group = place(name)
        assert other_layer < layer or (other_layer, other_group) == (layer, group), f"{module} imports {name}"


def test_the_backend_imports_by_full_names():
    for module, path in BACKEND_MODULES.items():
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        assert not any(isinstance(node, ast.ImportFrom) and node.level for node in nodes), module


def test_stages_never_import_each_other():
    for stage in ("thinker", "talker", "token2wav"):
        others = {"thinker", "talker", "token2wav"} - {stage}
        for module, path in BACKEND_MODULES.items():
            if module.startswith(f"triton_omni.{stage}"):
                assert not {name.split(".")[1] for name in own_imports(path)} & others, module


def test_vllm_is_imported_by_its_hooks_alone():
    found = importing("vllm")
    assert found
    assert {module for module in found if not module.startswith("triton_omni.vllm_hooks")} == set()


def test_triton_is_imported_by_the_models_alone():
    assert importing("triton_python_backend_utils") == set()
    for path in MODEL_FILES:
        assert "triton_python_backend_utils" in top_level(path)
    assert not any(top_level(path) & {"triton_python_backend_utils"} for path in CLIENT_MODULES.values())


def test_models_import_the_launching_module_alone():
    for path in MODEL_FILES:
        assert {name for name in imports(path) if name.startswith("triton_omni.")} == {
            "triton_omni.stub",
            "triton_omni.stub.launch",
        }


def test_client_and_backend_know_nothing_of_each_other():
    assert not any("triton_omni" in top_level(path) for path in CLIENT_MODULES.values())
    assert importing("triton_omni_client") == set()


def test_the_gateway_is_the_client_a_web_server_sound_and_detectors_of_speech_alone():
    assert "triton_omni_gateway.app" in GATEWAY_MODULES
    web = {"fastapi", "h11", "prometheus_client", "pydantic", "pydantic_core", "starlette", "uvicorn", "websockets"}
    speech = {"av", "loguru", "numpy", "onnxruntime", "pipecat"}
    allowed = {"triton_omni_client", "triton_omni_gateway", "pythonjsonlogger", *speech, *web, *sys.stdlib_module_names}
    for module, path in GATEWAY_MODULES.items():
        assert top_level(path) <= allowed, module
    for path in [*BACKEND_MODULES.values(), *CLIENT_MODULES.values()]:
        assert "triton_omni_gateway" not in top_level(path), path


def test_token2wav_is_torch_and_numpy_alone():
    # pydantic: its ValidationError is what settings raise.
    allowed = {"torch", "numpy", "pydantic", "triton_omni", *sys.stdlib_module_names}
    ours = {"core", "session", "checkpoint", "policy", "token2wav"}
    kernels = {"triton_omni.token2wav.kernels"}
    kernels |= {f"triton_omni.token2wav.{kind}_kernels" for kind in ("attention", "layer", "solver")}
    decode = {module for module in BACKEND_MODULES if module.startswith("triton_omni.vllm_hooks.kernels.")}
    assert importing("triton") == kernels | decode | {"triton_omni.core.kernel_launch"}
    stage = {"triton_omni.token2wav.stage", "triton_omni.token2wav.open_session"}
    for module, path in BACKEND_MODULES.items():
        if module.startswith("triton_omni.token2wav") and module not in stage:
            assert top_level(path) - ({"triton"} if module in kernels else set()) <= allowed, module
            assert {name.split(".")[1] for name in own_imports(path)} <= ours, module
            assert not stage & own_imports(path)


@pytest.mark.parametrize(
    "found", [BACKEND_MODULES, CLIENT_MODULES, GATEWAY_MODULES], ids=["backend", "client", "gateway"]
)
def test_no_modules_import_each_other(found):
    """Not even inside functions or for types alone: a circle cannot be read from one end."""
    packages = {module for module, path in found.items() if path.name == "__init__.py"}
    graph = {module: absolute_imports(module, path) & (set(found) - packages) for module, path in found.items()}
    list(graphlib.TopologicalSorter(graph).static_order())


def test_the_package_itself_imports_nothing():
    assert imports(BACKEND / "__init__.py") == set()


PROC_READERS = {
    "request/media/fork_server.py",  # VmData: psutil adds the stack, which RLIMIT_DATA does not count
    "session/server_folder.py",  # namespace, auxiliary vector, start in clock ticks
    "supervisor/leftovers.py",  # maps: psutil reads the far slower smaps
    "supervisor/machine.py",  # a kernel setting
}


def test_processes_are_examined_by_psutil_except_for_what_it_lacks():
    found = {
        path for path in BACKEND_MODULES.values() if re.search(r"[(=] ?f?\"/proc\b", path.read_text(encoding="utf-8"))
    }
    assert {str(path.relative_to(BACKEND)) for path in found} <= PROC_READERS


def test_modules_of_tests_make_large_inputs_when_they_use_them(collected_bytes):
    """Four workers, each of which imports vLLM, share a machine of 24 GB with the servers of tests."""
    assert collected_bytes < 1800 << 20
