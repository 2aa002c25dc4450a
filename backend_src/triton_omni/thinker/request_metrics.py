# SPDX-License-Identifier: Apache-2.0
"""Metrics of requests, counted by the thinker: the only stage that sees every request begin and end."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Final, get_args

from triton_omni.core.errors import InternalError, OmniError
from triton_omni.core.logs import log_event
from triton_omni.core.metrics import POWERS, Histogram, LeakWatch, Metric
from triton_omni.core.tracing import NO_SPAN, Span, Tracer
from triton_omni.request.parse import RawRequest
from triton_omni.session.ledger import SessionLedger
from triton_omni.session.ledger_table import CANCELLED
from triton_omni.session.outcome import Outcome, RequestOutcome
from triton_omni.thinker.open_session import OpenSession

STATES: Final = ("preparing", "writing", "speaking", "closing")

_UNEXPLAINED: Final = RequestOutcome("internal")

logger = logging.getLogger(__name__)


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


class RequestMetrics:
    """Metrics that the stage's loop updates; another thread calls `metrics`.

    Args:
        ledger: where the other stages publish how they ended a request.
        tracer: of the thinker's spans.
    """

    def __init__(self, ledger: SessionLedger, tracer: Tracer) -> None:
        self._ledger = ledger
        self._tracer = tracer
        self.outcomes = OutcomeCounter()
        """Outcomes of all requests to the server."""
        self.prompt_tokens = 0
        self.reply_tokens = 0
        self.cached_tokens = 0
        self.batches = Histogram(POWERS)
        self._leaks = LeakWatch()
        self._accepted: deque[OpenSession] = deque()

    def count_unread(self, error: Exception) -> None:
        """Count a request that could not be read and ended with this error."""
        self.outcomes.receive()
        self._end(
            RequestOutcome.of(error if isinstance(error, OmniError) else InternalError("unreadable"), "thinker"),
            NO_SPAN,
        )

    def receive(self, raw: RawRequest, accepted_ns: int) -> Span:
        """Count a request, and begin its span."""
        self.outcomes.receive()
        return self._tracer.start_span(raw.traceparent, accepted_ns)

    def refuse(self, error: OmniError, raw: RawRequest, span: Span) -> OmniError:
        """Count a received request that gets no session, and return `error`, which answers it."""
        self._end(RequestOutcome.of(error, "thinker"), span, request=raw.request_id)
        return error

    def accept(self, session: OpenSession) -> None:
        """Queue the log record of a request that got a session.

        After a pause a log record takes a quarter of a millisecond, which would delay first audio.
        """
        self._accepted.append(session)

    def log_accepted(self) -> None:
        """Write the queued log records; on the loop's thread, once it has nothing more urgent to do."""
        while self._accepted:
            session = self._accepted.popleft()
            log_event(logger, "accepted", stage="thinker", request=session.label, session=session.key.name)

    def close(self, session: OpenSession) -> None:
        """Count a session that no stage holds any more, by the outcome of the stage that answered it, else by the
        thinker's.
        """
        self.log_accepted()
        ledger, key = self._ledger, session.key
        ending = ledger.outcome(key, "token2wav") or ledger.outcome(key, "talker") or session.ending
        if ending is None:
            ending = RequestOutcome("cancelled") if ledger.has(key, CANCELLED) else _UNEXPLAINED
        self._end(
            ending,
            session.span,
            request=session.label,
            session=key.name,
            prompt_tokens=session.session.prompt_tokens if session.session else None,
            cached_tokens=session.cached_tokens,
            reply_tokens=session.reply_tokens,
            seconds=(session.ended_ns - session.accepted_ns) / 1e9,
        )

    def _end(self, ending: RequestOutcome, span: Span, **fields: str | float | None) -> None:
        fields |= {"code": ending.code, "by": ending.by}
        self.outcomes.end(ending)
        log_event(logger, ending.outcome, stage="thinker", **fields)
        span.end(ending.code, outcome=ending.outcome, **fields)

    def metrics(self, open_now: Sequence[OpenSession], taken: set[int]) -> Iterator[Metric]:
        """Yield the metrics.

        Args:
            open_now: the sessions that the stage holds.
            taken: slots that are not free.
        """
        states = Counter(session.state for session in open_now)
        for state in STATES:
            yield Metric("omni_sessions_by_state", states[state], {"state": state})
        yield Metric("omni_leaked_sessions", self._leaks.count(_overstayed(open_now, taken)))
        yield Metric("omni_prompt_tokens_total", self.prompt_tokens)
        yield Metric("omni_reply_tokens_total", self.reply_tokens)
        yield Metric("omni_cached_tokens_total", self.cached_tokens)
        yield from self.outcomes.metrics()
        yield from self.batches.metrics("omni_batch_size")


def _overstayed(open_now: Sequence[OpenSession], taken: set[int]) -> set[int]:
    """Return the slots that are taken without a session, or by one after its deadline."""
    now = time.monotonic_ns()
    return taken - {session.key.slot for session in open_now if now < session.deadline_ns}
