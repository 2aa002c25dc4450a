# SPDX-License-Identifier: Apache-2.0
"""The comparison of variants, run as its command: one that is served and loaded, one that cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from processes import UNMEASURED
from server.serving import ROOT

CHANGED = json.dumps({"thinker": {"max_sessions": 3}, "bench": "--concurrency 2"})


def test_each_variant_is_served_loaded_and_stopped(tiny_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "scripts/compare", "--model", str(tiny_checkpoint), "--out", str(out)]
    command += ["--variant", f"changed={CHANGED}", "--", "--concurrency", "1", "--requests", "2", "--warm-up", "0"]
    command += ["--max-tokens", "8", "--talker-max-tokens", "24", "--no-plots"]
    environment = os.environ | UNMEASURED | {"COLUMNS": "100"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "max_sessions: 3" in (out / "changed" / "repository" / "thinker" / "1" / "stage.yaml").read_text()
    (run,) = json.loads((out / "changed" / "bench.json").read_text())["runs"]
    assert (run["summary"]["completed"], run["summary"]["errors"]) == (2, {})
    audio_ms = 1000 * run["summary"]["time_to_first_audio_s"]["p50"]
    row = next(line.split() for line in done.stdout.splitlines() if line.split()[:2] == ["2", "changed"])
    assert row[3] == f"{audio_ms:.0f}/-"
