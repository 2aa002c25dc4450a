# SPDX-License-Identifier: Apache-2.0
"""YAML files of plain values. Knows nothing of what the values mean."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml


class UnreadableYaml(ValueError):
    """A file that cannot be read; the message is the reason, with the place where there is one."""


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice: its first value would have no effect."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in keys:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r:.80} is given twice", key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """The value of a file; None of an empty one.

    Raises:
        UnreadableYaml: there is no such file, or it is no YAML of plain values in UTF-8.
    """
    try:
        return _Loader(path.read_text(encoding="utf-8")).get_single_data()
    # Other errors than YAML's come from impossible dates, numbers with too many digits, and deep nesting.
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UnreadableYaml(_reason(error)) from error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        where = f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
        return f"{error.problem} ({where})"
    return " ".join(str(error).split())
