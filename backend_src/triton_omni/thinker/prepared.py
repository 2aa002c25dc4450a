# SPDX-License-Identifier: Apache-2.0
"""What the thinker's stage takes once a client's request was made ready, and who makes it so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from triton_omni.engine import Sampling, ThinkerPlaced
from triton_omni.request import RawRequest
from triton_omni.wire import Session


@dataclass(frozen=True)
class Prepared:
    """A request that was checked, decoded and tokenised."""

    placed: ThinkerPlaced
    sampling: Sampling
    session: Session
    timeout_s: float


class Intake(Protocol):
    """Makes a client's request ready for the engine; called on a pool of threads."""

    def prepare(self, raw: RawRequest, accepted_ns: int) -> Prepared:
        """Check, decode and tokenise. Raises `OmniError`."""
