# SPDX-License-Identifier: Apache-2.0
"""Freed memory is kept where it is asked for: large arrays fault their pages in once. Modules are no garbage."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

from triton_omni.core.heap import never_collected, uncollected

PROGRAM = """
import resource, sys
import numpy as np
from triton_omni.core.heap import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()
np.ones(40 << 17)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    np.ones(40 << 17)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Page faults of five arrays of 40 MB, one after another, after a first one."""
    found = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    return int(found.stdout)


def test_large_arrays_take_the_memory_of_those_before() -> None:
    # A kernel may give large pages, of which there are 512 times fewer.
    assert 10 * faults("kept") < faults("as it comes")


class Ring:
    """Garbage for a collection alone."""

    def __init__(self) -> None:
        self.itself = self


def test_what_is_made_uncollected_is_looked_through_no_more_and_all_else_is() -> None:
    try:
        with uncollected():
            assert not gc.isenabled()
            kept = weakref.ref(Ring())
        assert gc.isenabled()
        later = weakref.ref(Ring())
        gc.collect()
        assert kept() is not None
        assert later() is None
    finally:
        gc.unfreeze()
    gc.collect()
    assert kept() is None


def test_what_a_library_would_collect_at_its_end_is_left_to_the_process() -> None:
    garbage = weakref.ref(Ring())
    with never_collected():
        assert not gc.isenabled()
        gc.unfreeze()
        gc.collect()
        assert garbage() is not None
    assert gc.isenabled()
    gc.collect()
    assert garbage() is None
