# SPDX-License-Identifier: Apache-2.0
"""Memory settings of a stage process: the C heap keeps freed arrays, and the garbage collector skips modules."""

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
"""Free bytes that stay at the end of the main heap; heaps of threads keep what they had."""

logger = logging.getLogger(__name__)


def keep_freed_memory() -> bool:
    """Have the C library keep the memory of freed large arrays; return False where it cannot (not glibc).

    Media processors allocate many arrays of tens of MB. By default glibc returns them to the kernel, and zeroing new
    pages took as long as all arithmetic. At most the memory that all media threads used at once stays.
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
    """Exclude objects made within from garbage collection: modules, which never go away.

    Otherwise the collector walks the half million objects of torch and vLLM several times during import. It walks them
    seven times more while vLLM makes its engine: a fifth of a stage's start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def never_collected() -> Iterator[None]:
    """Disable garbage collection within, explicit calls included: for a process that ends next.

    vLLM collects two million objects when it closes its engine: half of a stage's stop.
    """
    collect = gc.collect
    gc.disable()
    gc.collect = lambda generation=2: 0
    try:
        yield
    finally:
        gc.collect = collect
        gc.enable()
