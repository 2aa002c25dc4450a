# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for a Hopper GPU, also where there is none to run it on; for most sizes it is compiled once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARED_BYTES = 227 << 10
"""What a program of a Hopper GPU can have."""
STACK_BYTES = 384
"""What a thread may have outside of its registers: with 760 a talker's draw took twice as long."""


def test_kernels_compile_for_a_hopper_gpu_and_fit_in_it(tmp_path: Path) -> None:
    backend = ROOT / "backend_src" / "triton_omni"
    sources = [*(backend / "token2wav").glob("*kernels.py"), *(backend / "vllm_hooks" / "kernels").glob("*.py")]
    launched = {name for path in sources for name in re.findall(r"^ +(_\w+)\[", path.read_text(), re.MULTILINE)}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    ended = subprocess.run(
        [sys.executable, ROOT / "tests" / "compile_ahead.py"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    first, again = ([line.split() for line in part.splitlines()] for part in ended.stdout.split("again\n"))
    assert {name for name, *_ in first} == launched
    assert max(int(shared) for _, shared, _, _ in first) <= SHARED_BYTES
    assert max(int(stack) for _, _, stack, _ in first) <= STACK_BYTES
    # A reply of any length ends among others, who must not wait while a kernel is compiled.
    assert again
    assert {compiled for *_, compiled in again} <= {compiled for *_, compiled in first}
