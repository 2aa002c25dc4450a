# SPDX-License-Identifier: Apache-2.0
"""Response to a client: one part of a stream, or a whole reply; and the form of its sound.

torch is imported for no more than its types: who puts a whole reply together is of numpy alone.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from triton_omni.session.engine import CallPiece

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

Sent: TypeAlias = "Tensor | NDArray[np.float32] | bytes"
"""Values of a response's tensors."""

_CALL_PIECES: Final = '{"tool_call_deltas":'


def call_pieces(pieces: Sequence[CallPiece]) -> str:
    """The `info` of a response that brings pieces of calls; empty where there are none."""
    told = ({name: value for name, value in vars(piece).items() if value is not None} for piece in pieces)
    return f"{_CALL_PIECES}{json.dumps([*told])}}}" if pieces else ""


def is_account(info: str) -> bool:
    """Return True if this `info` is the last response's."""
    return bool(info) and not info.startswith(_CALL_PIECES)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One response."""

    text: str = ""
    audio: Tensor | NDArray[np.float32] | None = None
    """fp32 [S], CPU: mono samples in [-1, 1] at 24 kHz; only with `audio_format` f32."""
    audio_base64: str = ""
    info: str = ""
    """JSON: the account of a reply in its last response, pieces of its calls in earlier ones."""

    def to_tensors(self) -> dict[str, Sent]:
        """text_output, audio_output [S], audio_base64, info."""
        return {
            "text_output": self.text.encode(),
            "audio_output": self.audio if self.audio is not None else np.empty(0, np.float32),
            "audio_base64": self.audio_base64.encode(),
            "info": self.info.encode(),
        }


# --- sound ------------------------------------------------------------------------------------------------------------


WAV_HEADER_BYTES = 44
# RIFF has no length that means "until the end": sox writes and reads this one so, and the other readers find the file's
# end before it.
_UNKNOWN_LENGTH = 0x7FFFF000


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
