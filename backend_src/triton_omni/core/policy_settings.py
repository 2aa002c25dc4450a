# SPDX-License-Identifier: Apache-2.0
"""Settings of the rules by which three stages share a GPU; `policy/` decides with them.

Each stage has those of the rules that it evaluates. 0 switches a rule off, except for `enough_sound_ms`.
`docs/benchmarks-history.md` has the effect of each.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Milliseconds = Annotated[int, Field(ge=0, le=10_000)]
NS_PER_MS = 1_000_000


class ThinkerPolicy(BaseModel):
    """Rules by which the thinker leaves a shared GPU to the later stages."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pause_ms: Milliseconds = 150
    """Longest pause after the rows of all pending first windows, so that their codes come sooner; 0 = none."""
    pause_text_ms: Milliseconds = 20
    """The same while a text-only reply is decoded."""


class Token2WavPolicy(BaseModel):
    """Rules by which token2wav claims a shared GPU and forms batches."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    claim_ms: Milliseconds = 150
    """Longest claim of the GPU for streams with an empty playback buffer; thinker and talker start no step meanwhile,
    and have the GPU for as long after it. 0 = none."""
    enough_sound_ms: Milliseconds = 500
    """Buffered sound with which a stream can wait for another batch. A window with less goes before a batch that is
    being launched. One with more joins a batch only if the most urgent one still is in time. 0 = only a stream without
    sound goes before."""
