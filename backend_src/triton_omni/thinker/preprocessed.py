# SPDX-License-Identifier: Apache-2.0
"""A preprocessed request, as the thinker's stage takes it, and the interface that makes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from triton_omni.request.media.killable import IsWanted
from triton_omni.request.parse import RawRequest
from triton_omni.session.engine import Sampling, ThinkerPlaced
from triton_omni.session.wire import Session

TakeTimeout = Callable[[float], None]
"""Called with a request's `timeout` in seconds."""


@dataclass(frozen=True)
class Preprocessed:
    """A request that was checked, decoded and tokenised."""

    placed: ThinkerPlaced
    sampling: Sampling
    session: Session


class Intake(Protocol):
    """Preprocesses a client's request for the engine; called on several threads."""

    def prepare_at_once(self, raw: RawRequest, accepted_ns: int, take_timeout: TakeTimeout) -> Preprocessed | None:
        """Run `prepare` on a short text if that is faster than a hand-over to another thread; return None for all other
        requests.
        """

    def prepare(
        self, raw: RawRequest, accepted_ns: int, take_timeout: TakeTimeout, is_wanted: IsWanted
    ) -> Preprocessed:
        """Check, decode and tokenise. `take_timeout` is called as soon as the timeout is known, before media are
        decoded. Raises `OmniError`.
        """

    def close(self) -> None:
        """Stop preprocessing, and release everything that outlives the process."""
