# SPDX-License-Identifier: Apache-2.0
"""What the thinker's stage takes once a client's request was made ready, and who makes it so."""

from __future__ import annotations

from collections.abc import Callable
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


class Intake(Protocol):
    """Makes a client's request ready for the engine; called on a pool of threads."""

    def prepare(self, raw: RawRequest, accepted_ns: int, take_timeout: Callable[[float], None]) -> Prepared:
        """Check, decode and tokenise. `take_timeout` is told the request's `timeout` in seconds as soon as it is known,
        before media are decoded. Raises `OmniError`."""
