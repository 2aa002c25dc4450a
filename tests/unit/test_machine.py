# SPDX-License-Identifier: Apache-2.0
"""The environment that tritonserver and its stages are given."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from triton_omni.serving.machine import TritonInstall, stub_environment

INSTALL = TritonInstall(Path("/triton/bin/tritonserver"), None, (Path("/triton/libs"),))
MODEL = Path("/models/omni")


def test_stages_find_this_interpreter_and_its_libraries_before_others() -> None:
    environment = stub_environment({"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/lib"}, INSTALL, MODEL)
    assert environment["PATH"] == f"{Path(sys.executable).parent}{os.pathsep}/usr/bin"
    assert environment["LD_LIBRARY_PATH"] == f"/triton/libs{os.pathsep}/lib"
    assert environment["OMNI_MODEL"] == "/models/omni"


def test_heaps_and_kept_plans_are_few_unless_the_operator_says_how_many() -> None:
    assert stub_environment({}, INSTALL, MODEL)["MALLOC_ARENA_MAX"] == "4"
    assert stub_environment({}, INSTALL, MODEL)["TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT"] == "2000"
    assert stub_environment({"MALLOC_ARENA_MAX": "16"}, INSTALL, MODEL)["MALLOC_ARENA_MAX"] == "16"
