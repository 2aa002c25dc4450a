# SPDX-License-Identifier: Apache-2.0
"""Outcomes of requests: each received request ends in exactly one way, and is counted once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from triton_omni.core.errors import ErrorCode, OmniError, StageName

Outcome = Literal["finished", "refused", "cancelled", "timed_out", "failed"]

OUTCOMES: Final[dict[ErrorCode, Outcome]] = {
    "bad_request": "refused",
    "too_large": "refused",
    "overloaded": "refused",
    "cancelled": "cancelled",
    "timeout": "timed_out",
    "internal": "failed",
}
"""Outcome of a request that ended with an error of this code."""

_CODES: Final[tuple[ErrorCode, ...]] = get_args(ErrorCode)
_STAGES: Final[tuple[StageName, ...]] = get_args(StageName)


@dataclass(frozen=True)
class RequestOutcome:
    """The end of a request: answered whole, or an error of a stage."""

    code: ErrorCode | None = None
    """Code of its error; None = it was answered whole."""
    stage: StageName = "thinker"
    """Stage that refused it or failed."""

    @classmethod
    def of(cls, error: OmniError, stage: StageName) -> RequestOutcome:
        """The end by an error that `stage` raised or answered."""
        return cls(error.code, error.stage or stage)

    @property
    def outcome(self) -> Outcome:
        """One of the five outcomes."""
        return "finished" if self.code is None else OUTCOMES[self.code]

    @property
    def by(self) -> StageName | None:
        """The stage that refused it or failed; None = it was answered, or its client went away."""
        return None if self.code in (None, "cancelled") else self.stage

    def to_number(self) -> int:
        """Pack it into a positive number below 2**16, for the ledger."""
        code = 0 if self.code is None else 1 + _CODES.index(self.code)
        return 1 + (code << 4 | _STAGES.index(self.stage))

    @classmethod
    def from_number(cls, number: int) -> RequestOutcome:
        """The ending of `to_number`."""
        code, stage = divmod(number - 1, 1 << 4)
        return cls(_CODES[code - 1] if code else None, _STAGES[stage])
