# SPDX-License-Identifier: Apache-2.0
"""Reports of measurements as JSON files, with date, versions and machine."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from .errors import BadRequest

_DIGITS: Final = 6
"""Decimal places of written figures: a microsecond."""


def environment() -> dict[str, Any]:
    """Return date, command, versions and machine of a measurement that begins now."""
    try:
        client = version("triton-omni-client")
    except PackageNotFoundError:
        client = "unknown"  # run from a source tree that is not installed
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "client_version": client,
        "python": platform.python_version(),
        "machine": platform.platform(),
    }


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report of plain JSON values with rounded figures.

    Raises:
        BadRequest: the file cannot be written.
    """
    text = json.dumps(rounded(report), ensure_ascii=False, allow_nan=False, indent=1)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise BadRequest(f"{path}: cannot be written: {error.strerror}") from error


def rounded(value: Any) -> Any:
    """Return plain JSON values with floats of six decimal places."""
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, Mapping):
        return {name: rounded(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    return value
