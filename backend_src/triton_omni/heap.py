# SPDX-License-Identifier: Apache-2.0
"""What becomes of the memory of large arrays once they are freed."""

from __future__ import annotations

import ctypes
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
"""Parameters of mallopt(3)."""
LARGEST_KEPT_BYTES: Final = 64 << 20
"""Larger arrays go back to the kernel one by one."""
KEPT_BYTES: Final = 256 << 20
"""Of free memory at the end of a heap."""


def keep_freed_memory() -> bool:
    """Have the C library keep what large arrays freed for the next ones; whether it can be told so (glibc alone).

    What processors make of an image, a sound or a video are many arrays of tens of MB. As glibc comes, the kernel gives
    and zeroes their pages anew each time, which took as long as all arithmetic together.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, KEPT_BYTES))
