# SPDX-License-Identifier: Apache-2.0
"""Outcomes of requests: each received request ends in exactly one way, and is counted once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, get_args

from triton_omni.core.errors import ErrorCode, OmniError, StageName
from triton_omni.core.metrics import Metric

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


class OutcomeCounter:
    """Counts requests; thread-safe, since they are received on Triton's threads and end on the loop's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._received = 0
        self._ended: Counter[RequestOutcome] = Counter()

    def receive(self) -> None:
        """One more has come."""
        with self._lock:
            self._received += 1

    def end(self, ending: RequestOutcome) -> None:
        """One of the received has ended."""
        with self._lock:
            self._ended[ending] += 1

    def metrics(self) -> Iterator[Metric]:
        """Requests received, those ended by outcome, and errors by code and stage; the first is never less than the
        sum of the second, and equal when no request is open.
        """
        with self._lock:
            received, ended = self._received, dict(self._ended)
        outcomes: Counter[Outcome] = Counter()
        for ending, count in ended.items():
            outcomes[ending.outcome] += count
            if ending.code is not None:
                yield Metric("omni_errors_total", count, {"stage": ending.stage, "code": ending.code})
        for outcome in get_args(Outcome):
            yield Metric("omni_requests_ended_total", outcomes[outcome], {"outcome": outcome})
        yield Metric("omni_requests_received_total", received)
