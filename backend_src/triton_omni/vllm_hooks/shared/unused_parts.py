# SPDX-License-Identifier: Apache-2.0
"""Parts of vLLM that its engine imports with all they need, and no stage runs: a sixth of the time of its import.

These are the parsers of reasoning and of tool calls, which bring the messages of vLLM's own HTTP server, and an
exporter of vLLM's traces; a stage's are made in `stub/launch.py`. Modules that are loaded already stay.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Final

_ABSENT: Final = ("opentelemetry.exporter.otlp.proto.grpc.trace_exporter",)
"""Modules that vLLM does without where they are not installed."""
_CLASSES: Final = {"vllm.parser.engine.adapters": "ParserEngineReasoningAdapter"}
"""A module, and the class of it that vLLM asks of a parser of reasoning whether it is one: there is no such parser."""

_stand_ins: dict[str, ModuleType | None] = {}


def set_aside() -> None:
    """Have what vLLM imports from now on find stand-ins in the places of these parts."""
    made: dict[str, ModuleType | None] = dict.fromkeys(_ABSENT)
    for name, class_name in _CLASSES.items():
        module = made[name] = ModuleType(name)
        setattr(module, class_name, type(class_name, (), {}))
    _stand_ins.update({name: module for name, module in made.items() if name not in sys.modules})
    sys.modules.update(_stand_ins)  # type: ignore[arg-type]


def put_back() -> None:
    """From now on whoever imports these parts gets the real ones."""
    for name in _stand_ins:
        del sys.modules[name]
    _stand_ins.clear()
