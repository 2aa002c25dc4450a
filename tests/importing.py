# SPDX-License-Identifier: Apache-2.0
"""Imported first, it halves the time that torch, transformers and vLLM take to be imported where tests are measured."""

from __future__ import annotations

import gc
import sys
import sysconfig
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import ModuleType

_LIBRARIES = sysconfig.get_path("purelib")
_exec_module = SourceFileLoader.exec_module


def _exec_untraced(self: SourceFileLoader, module: ModuleType) -> None:
    """Coverage, which measures this project alone, is else asked about each call in a library, too."""
    tracer = sys.gettrace()
    if tracer is None or not self.path.startswith(_LIBRARIES):
        _exec_module(self, module)
        return
    sys.settrace(None)
    try:
        _exec_module(self, module)
    finally:
        sys.settrace(tracer)


SourceFileLoader.exec_module = _exec_untraced  # type: ignore[method-assign]

# Until `all_is_imported` nothing but modules is made, which are there to stay.
gc.disable()


def all_is_imported() -> None:
    """Collect garbage from now on, and leave modules out of it."""
    gc.freeze()
    gc.enable()


def more_is_imported(_freeze: Callable[[], None] = gc.freeze) -> None:
    """Leave out what a test has imported late, also where `gc.freeze` has been put out of use since."""
    gc.collect()
    _freeze()


def all_has_ended() -> None:
    """An interpreter that ends with frozen objects has its libraries tell of leaks."""
    gc.unfreeze()
