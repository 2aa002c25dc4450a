# SPDX-License-Identifier: Apache-2.0
"""What becomes of the memory of large arrays once they are freed, and what Python looks for garbage in."""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
"""Parameters of mallopt(3)."""
_LARGEST_KEPT_BYTES: Final = (64 << 20, 32 << 20)
"""Larger arrays go back to the kernel one by one. Some versions of glibc take no more than the second."""
_KEPT_BYTES: Final = 256 << 20
"""Of free memory at the end of the main heap; those of threads keep what they had."""

logger = logging.getLogger(__name__)


def keep_freed_memory() -> bool:
    """Have the C library keep what large arrays freed for the next ones; whether it can be told so (glibc alone).

    What processors make of an image, a sound or a video are many arrays of tens of MB. As glibc comes, the kernel gives
    and zeroes their pages anew each time, which took as long as all arithmetic together. What stays is at most what all
    threads that process media had at once.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        logger.info("large arrays take fresh pages each time: this C library has no mallopt")
        return False
    largest = any(mallopt(_MMAP_THRESHOLD, size) for size in _LARGEST_KEPT_BYTES)
    kept = bool(mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))
    if not (largest and kept):
        logger.info("large arrays take fresh pages each time: mallopt refused")
    return largest and kept


@contextmanager
def uncollected() -> Iterator[None]:
    """Leaves out of every collection of garbage what is made within: modules, which are there to stay.

    The half million objects of torch's and vLLM's are else looked through several times while they are imported and,
    all of them, seven times while vLLM makes its engine: a fifth of a stage's start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def never_collected() -> Iterator[None]:
    """Collects no garbage within, whoever asks for it: for a process that ends next, and all its memory with it.

    vLLM looks through two million objects, modules among them, when it closes its engine: half of a stage's stop.
    """
    collect = gc.collect
    gc.disable()
    gc.collect = lambda generation=2: 0
    try:
        yield
    finally:
        gc.collect = collect
        gc.enable()
