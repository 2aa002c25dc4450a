# SPDX-License-Identifier: Apache-2.0
"""Opens a file with FFmpeg, in bounded CPU time.

FFmpeg compares each tag of a file with all others, so a megabyte of tags takes minutes; it has no option to skip them.
Knows no format.
"""

from __future__ import annotations

import io
import signal
from collections.abc import Mapping

import av
from av.container import InputContainer

from triton_omni.core.settings import RequestLimits

_LEAST_S = 1.0
_SHARE = 16


def header_seconds(limits: RequestLimits) -> float:
    """CPU seconds that the header of one file may take."""
    return max(_LEAST_S, limits.max_decode_seconds / _SHARE)


def open_file(data: bytes, kind: str, limits: RequestLimits, options: Mapping[str, str]) -> InputContainer:
    """Open a file in memory by FFmpeg's demuxer `kind`; SIGPROF ends this process where the header takes too long.

    Raises:
        FFmpegError: the file cannot be read.
    """
    signal.setitimer(signal.ITIMER_PROF, header_seconds(limits))
    try:
        return av.open(io.BytesIO(data), mode="r", format=kind, metadata_errors="replace", options=dict(options))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
