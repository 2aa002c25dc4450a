# SPDX-License-Identifier: Apache-2.0
"""How samples leave: 16-bit PCM and the header of a WAV file whose length is not known yet (pure)."""

from __future__ import annotations

import base64
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

PCM16_PEAK = 32767
WAV_HEADER_BYTES = 44
# RIFF has no length that means "until the end": sox writes and reads this one so, and the other readers find the file's
# end before it.
_UNKNOWN_LENGTH = 0x7FFFF000


def to_pcm16(samples: Tensor) -> bytes:
    """fp32 [S] in [-1, 1] to little-endian 16-bit samples; values outside are clipped."""
    scaled = (samples.clamp(-1.0, 1.0) * PCM16_PEAK).round()
    return scaled.short().cpu().numpy().astype("<i2").tobytes()


def wav_header(sample_rate: int, data_bytes: int | None = None) -> bytes:
    """The 44-byte header of a mono 16-bit WAV file.

    Args:
        sample_rate: in hertz.
        data_bytes: length of what follows; None writes the streaming form of unknown length.
    """
    size = _UNKNOWN_LENGTH if data_bytes is None else data_bytes
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate, sample_rate * 2, 2, 16)
    return b"RIFF" + struct.pack("<I", size + 36) + b"WAVE" + form + b"data" + struct.pack("<I", size)


def to_base64(data: bytes) -> str:
    """Base64 text of `data`."""
    return base64.b64encode(data).decode("ascii")


def whole_groups(data: bytes) -> tuple[bytes, bytes]:
    """`data` cut after its last group of three bytes, and the rest.

    Base64 writes three bytes as four characters and pads what is less: texts whose bytes are whole groups, all but the
    last, are one text of base64 when they are joined.
    """
    cut = len(data) - len(data) % 3
    return data[:cut], data[cut:]
