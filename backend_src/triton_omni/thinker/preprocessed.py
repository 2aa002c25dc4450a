# SPDX-License-Identifier: Apache-2.0
"""What the thinker's stage takes once a client's request was made ready, and who makes it so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from triton_omni.request.media.killable import IsWanted
from triton_omni.request.parse import RawRequest
from triton_omni.session.engine import Sampling, ThinkerPlaced
from triton_omni.session.wire import Session

TakeTimeout = Callable[[float], None]
"""Is told a request's `timeout` in seconds."""


@dataclass(frozen=True)
class Preprocessed:
    """A request that was checked, decoded and tokenised."""

    placed: ThinkerPlaced
    sampling: Sampling
    session: Session


class Intake(Protocol):
    """Makes a client's request ready for the engine; called on several threads."""

    def prepare_at_once(self, raw: RawRequest, accepted_ns: int, take_timeout: TakeTimeout) -> Preprocessed | None:
        """`prepare` of a short text, which takes no longer than to hand it to another thread; None of all else."""

    def prepare(
        self, raw: RawRequest, accepted_ns: int, take_timeout: TakeTimeout, is_wanted: IsWanted
    ) -> Preprocessed:
        """Check, decode and tokenise. `take_timeout` is called as soon as the timeout is known, before media are
        decoded; `is_wanted` is asked again and again while they are. Raises `OmniError`."""

    def close(self) -> None:
        """Prepare nothing more, and hold nothing that outlives the process."""
