# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for the GPUs that vLLM supports, also where there is none; for most sizes it compiles once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.timeout(1800)  # it compiles with the lowest priority, beside all other tests

ROOT = Path(__file__).parents[2]
KILOBYTE = 1 << 10
SHARED_BYTES = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory that a program can have, in kilobytes, by ten times the compute capability. Source: CUDA C++
Programming Guide, technical specifications per compute capability.
"""
STACK_BYTES = 384
"""Most bytes of a thread outside its registers: with 760 a talker's draw took twice as long."""
NEEDS_SHARED_MEMORY = {"_product"}
"""Kernels that run only where a program has 227 KB (`layer_kernels.fit`)."""
FROM_HOPPER_ON = {"_scaled_gated_product"}
"""Kernels of E4M3, which earlier GPUs have too few registers for (`decode_product.reads_e4m3`)."""
ASYNCHRONOUS = {"_split_product", "_scaled_gated_product"}
"""Kernels whose matrix products run while weights are converted or waited for."""


class Launch(NamedTuple):
    """A line of `compile_ahead.py`."""

    capability: int
    kernel: str
    shared: int
    stack: int
    compiled: str


def launched_kernels() -> set[str]:
    backend = ROOT / "backend_src" / "triton_omni"
    sources = [*(backend / "token2wav").glob("*kernels.py"), *(backend / "vllm_hooks" / "kernels").glob("*.py")]
    return {name for path in sources for name in re.findall(r"^ +(_\w+)\[", path.read_text(), re.MULTILINE)}


def compiled(cache: Path, *arguments: str) -> tuple[list[list[Launch]], set[str]]:
    """The launches before and after the line `again`, and the kernels whose matrix products ptxas has made wait."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DUMP_PTXAS_LOG": "1"}
    ended = subprocess.run(
        [sys.executable, ROOT / "tests" / "compile_ahead.py", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    lines = [re.findall(r"^(\d+) (\w+) (\d+) (\d+) (\w+)$", part, re.M) for part in ended.stdout.split("again\n")]
    launches = [
        [Launch(int(capability), name, int(shared), int(stack), key) for capability, name, shared, stack, key in part]
        for part in lines
    ]
    return launches, set(re.findall(r"wgmma.mma_async instructions are serialized .*'(\w+)'", ended.stdout))


def assert_fits(launches: list[Launch]) -> None:
    assert all(one.shared <= SHARED_BYTES[one.capability] * KILOBYTE for one in launches)
    assert max(one.stack for one in launches) <= STACK_BYTES


def test_kernels_compile_for_a_hopper_gpu_and_fit_in_it(tmp_path: Path) -> None:
    (first, again), serialised = compiled(tmp_path, "all", "90")
    assert {one.kernel for one in first} == launched_kernels()
    assert_fits(first)
    assert not serialised & ASYNCHRONOUS
    # A reply of any length ends among others, who must not wait while a kernel is compiled.
    assert again
    assert {one.compiled for one in again} <= {one.compiled for one in first}


def test_kernels_compile_for_other_gpus_and_fit_in_them(tmp_path: Path) -> None:
    others = set(SHARED_BYTES) - {90}
    (launches,), _ = compiled(tmp_path, "once", *map(str, sorted(others)))
    for capability in others:
        small, early = SHARED_BYTES[capability] < SHARED_BYTES[90], capability < 90
        lacks = (NEEDS_SHARED_MEMORY if small else set()) | (FROM_HOPPER_ON if early else set())
        assert {one.kernel for one in launches if one.capability == capability} == launched_kernels() - lacks
    assert_fits(launches)
