# SPDX-License-Identifier: Apache-2.0
"""When a request that the server had no room for is sent again, and how long that waits.

Only `Overloaded` is tried again, and only before the reply has begun. Other errors would come again, and a reply that
has begun cannot start anew unseen.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass

import tenacity

from .errors import BadRequest, Overloaded


@dataclass(frozen=True)
class Retry:
    """How often and how patiently a refused request is sent again.

    A wait is what the server asked for (`retry_after_ms`) plus a random time that doubles its bound with each
    attempt, so that those who were refused together do not come back together. No wait outlasts the request's timeout.

    Raises:
        BadRequest: a value out of range.
    """

    attempts: int = 5
    """How often a request is sent at most; 1 is once."""
    first_wait: float = 0.25
    """Bound of the random part before the second attempt, in seconds."""
    longest_wait: float = 8.0
    """Bound of the random part of any wait, in seconds."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise BadRequest(f"attempts {self.attempts} is below 1")
        if not 0 <= self.first_wait <= self.longest_wait:
            raise BadRequest(f"first_wait {self.first_wait} is not between 0 and longest_wait, {self.longest_wait}")

    def blocking(self, seconds: float, stop: threading.Event) -> tenacity.Retrying:
        """Calls a function until it does not raise `Overloaded`; its error is raised when patience ends.

        Args:
            seconds: no attempt begins later than this.
            stop: ends a wait early.
        """
        return tenacity.Retrying(
            stop=self._stop(seconds),
            wait=self._wait,
            retry=_AGAIN,
            sleep=tenacity.sleep_using_event(stop),
            reraise=True,
        )

    def awaiting(self, seconds: float, stop: asyncio.Event) -> tenacity.AsyncRetrying:
        """`blocking` for a coroutine function."""

        async def sleep(duration: float) -> None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), duration)

        return tenacity.AsyncRetrying(
            stop=self._stop(seconds), wait=self._wait, retry=_AGAIN, sleep=sleep, reraise=True
        )

    def _stop(self, seconds: float) -> tenacity.stop_any:
        return tenacity.stop_any(tenacity.stop_after_attempt(self.attempts), tenacity.stop_before_delay(seconds))

    def _wait(self, state: tenacity.RetryCallState) -> float:
        error = None if state.outcome is None else state.outcome.exception()
        hint = error.retry_after_ms if isinstance(error, Overloaded) else None
        random_part = tenacity.wait_random_exponential(multiplier=self.first_wait, max=self.longest_wait)
        return (hint or 0) / 1000 + random_part(state)


_AGAIN = tenacity.retry_if_exception_type(Overloaded)

DEFAULT_RETRY = Retry()
NO_RETRY = Retry(attempts=1)
"""Every refusal is raised at once."""
