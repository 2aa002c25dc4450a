# SPDX-License-Identifier: Apache-2.0
"""The GPU time of each stage's steps, from a measured file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

Stage = Literal["thinker", "talker", "token2wav"]
MEASURED = Path(__file__).with_name("costs.json")


class Costs(BaseModel):
    """Milliseconds of the GPU without other stages beside it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    thinker_step_ms: float
    thinker_sequence_ms: float
    """For each sequence that decodes; the host's work for its row as well."""
    thinker_token_ms: float
    """For each token of a prompt."""
    talker_step_ms: float
    talker_sequence_ms: float
    """For each sequence that decodes."""
    talker_token_ms: float
    """For each token of a prompt."""
    window_ms: float
    """For a batch of windows, however small."""
    frame_ms: float
    """For each mel frame of a batch."""
    slowdown: dict[Stage, dict[Stage, float]]
    """By stage and a stage beside it: the added time as a fraction of the own one."""

    def rate(self, stage: Stage, busy: set[Stage]) -> float:
        """Return the progress of a stage's step in milliseconds a millisecond, beside the other busy stages."""
        return 1 / (1 + sum(self.slowdown[stage][other] for other in busy - {stage}))


def read_costs(path: Path = MEASURED) -> Costs:
    """Return the costs of a file.

    Raises:
        ValidationError: a key is missing, unknown or of the wrong type.
    """
    return Costs.model_validate(json.loads(path.read_text(encoding="utf-8")))
