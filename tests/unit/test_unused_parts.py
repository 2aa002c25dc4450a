# SPDX-License-Identifier: Apache-2.0
"""Parts of vLLM that no stage runs: absent or stood in for while vLLM is imported, as ever before and after."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

from triton_omni.vllm_hooks.shared import unused_parts

ABSENT, CLASS = "package_of_a_test.exporter", "package_of_a_test.parser"


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unused_parts, "_ABSENT", (ABSENT,))
    monkeypatch.setattr(unused_parts, "_CLASSES", {CLASS: "Parser"})


def test_parts_are_absent_or_stood_in_for_until_they_are_put_back() -> None:
    unused_parts.set_aside()
    try:
        with pytest.raises(ImportError):
            importlib.import_module(ABSENT)
        assert not isinstance("anything", importlib.import_module(CLASS).Parser)
    finally:
        unused_parts.put_back()
    assert not {ABSENT, CLASS} & set(sys.modules)


def test_what_is_loaded_already_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = ModuleType(CLASS)
    monkeypatch.setitem(sys.modules, CLASS, loaded)
    unused_parts.set_aside()
    try:
        assert importlib.import_module(CLASS) is loaded
    finally:
        unused_parts.put_back()
    assert sys.modules[CLASS] is loaded
