# SPDX-License-Identifier: Apache-2.0
"""The machine: the environment of tritonserver and its stages, and ports."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from triton_omni.supervisor.machine import ServerError, TritonInstall, choose_ports, stub_environment

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


@pytest.mark.parametrize("port", [0, 8000])
def test_a_name_that_nothing_resolves_is_told_in_the_resolver_s_words(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def bind(_socket: socket.socket, address: Any) -> NoReturn:
        asked.append(address)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket.socket, "bind", bind)
    said = rf"^http cannot listen on nowhere:{port} \(Name or service not known\): choose an address of this machine"
    with pytest.raises(ServerError, match=said):
        choose_ports("nowhere", {"http": port})
    assert len(asked) <= 2, "a resolver may take seconds"
