# SPDX-License-Identifier: Apache-2.0
"""The small evaluation that every commit passes: 20 sentences, 10 pictures, 10 sounds, and their bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from triton_omni_client import cli

SMALL = ["--sentences", "20", "--prompts", "0", "--pictures", "10", "--sounds", "10", "--setting", "served"]
BOUNDS = {
    "--max-word-errors": "20",
    "--max-text-errors": "5",
    "--max-skipped-words": "2",
    "--max-repeated-words": "2",
    "--max-clicks": "6",
    "--max-clipped": "0.1",
    "--min-whole-replies": "100",
    "--min-right-voices": "95",
    "--min-pictures": "80",
    "--min-sounds": "60",
}
"""`training/mini` keeps to them with room: word errors are 9 %, clicks 2 %, sounds 80 %, and all else has no fault.

A server misses one if every third reply is another request's, in another voice, or lacks a chunk or words.
"""


def evaluate(url: str, folder: Path, *options: str) -> Result:
    """`triton-omni evaluate` of a server."""
    return CliRunner().invoke(cli.app, ["evaluate", "--url", url, "-o", str(folder), *options])


def small(url: str, folder: Path) -> Result:
    """The small evaluation; exit code 1 where a bound is missed."""
    return evaluate(url, folder, *SMALL, *(part for bound in BOUNDS.items() for part in bound), "--no-plots")


def report_of(folder: Path) -> dict[str, Any]:
    """The report of an evaluation."""
    found: dict[str, Any] = json.loads((folder / "evaluate.json").read_text(encoding="utf-8"))
    return found
