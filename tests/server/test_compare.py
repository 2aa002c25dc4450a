# SPDX-License-Identifier: Apache-2.0
"""The comparison of variants, run as its command: one that is served once, and asked two loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from processes import UNMEASURED
from server.serving import ROOT

CHANGED = json.dumps({"thinker": {"max_sessions": 3}, "bench": "--concurrency 2"})


def test_each_variant_is_served_loaded_and_stopped(tiny_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "scripts/compare", "--model", str(tiny_checkpoint), "--out", str(out)]
    command += ["--variant", f"changed={CHANGED}", "--load", "spoken=--requests 2", "--load", "written=--text-only"]
    command += ["--", "--concurrency", "1", "--requests", "3", "--warm-up", "0"]
    command += ["--max-tokens", "8", "--talker-max-tokens", "24", "--no-plots"]
    environment = os.environ | UNMEASURED | {"COLUMNS": "100"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert (out / "changed" / "profile.yaml").read_text() == "thinker:\n  max_sessions: 3\n"
    spoken, written = (summary_of(out / "changed" / f"{load}.json") for load in ("spoken", "written"))
    assert [(found["completed"], found["errors"]) for found in (spoken, written)] == [(2, {}), (3, {})]
    assert written["time_to_first_audio_s"]["p50"] is None
    audio_ms = 1000 * spoken["time_to_first_audio_s"]["p50"]
    row = next(line.split() for line in done.stdout.splitlines() if line.split()[:3] == ["spoken", "2", "changed"])
    assert row[4] == f"{audio_ms:.0f}/-"
    assert len(list((out / "changed").glob("server-*.log"))) == 1


def summary_of(report: Path) -> dict[str, Any]:
    (run,) = json.loads(report.read_text())["runs"]
    summary: dict[str, Any] = run["summary"]
    return summary
