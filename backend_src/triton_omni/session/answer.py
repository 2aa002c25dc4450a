# SPDX-License-Identifier: Apache-2.0
"""Response to a client: one part of a stream, or a whole reply.

torch is imported for no more than its types: who puts a whole reply together is of numpy alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

Sent: TypeAlias = "Tensor | NDArray[np.float32] | bytes"
"""Values of a response's tensors."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One response."""

    text: str = ""
    audio: Tensor | NDArray[np.float32] | None = None
    """fp32 [S], CPU: mono samples in [-1, 1] at 24 kHz; only with `audio_format` f32."""
    audio_base64: str = ""
    info: str = ""
    """JSON, on the last response only."""

    def to_tensors(self) -> dict[str, Sent]:
        """text_output, audio_output [S], audio_base64, info."""
        return {
            "text_output": self.text.encode(),
            "audio_output": self.audio if self.audio is not None else np.empty(0, np.float32),
            "audio_base64": self.audio_base64.encode(),
            "info": self.info.encode(),
        }
