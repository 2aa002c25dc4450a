# SPDX-License-Identifier: Apache-2.0
"""Trace spans of a stage's part in a request.

Spans are made by `stub/otel.py` where an exporter is configured; everywhere else these do nothing.
"""

from __future__ import annotations

from typing import Final, Protocol

Attribute = str | int | float


class Span(Protocol):
    """One stage's part in one request; any thread may call it."""

    @property
    def traceparent(self) -> str:
        """W3C `traceparent` that makes later parts children of this one; empty = nobody traces it."""

    def event(self, name: str) -> None:
        """Record an event now."""

    def end(self, error: str | None = None, **attributes: Attribute | None) -> None:
        """End the span now, with an error of this code, if any. Attributes that are None are left out."""


class Tracer(Protocol):
    """Makes the spans of one stage."""

    @property
    def is_on(self) -> bool:
        """True if spans are exported."""

    def start_span(self, traceparent: str, start_ns: int) -> Span:
        """A span that began at `start_ns` of the monotonic clock, under the one that `traceparent` names, if any."""

    def close(self) -> None:
        """Export the spans that have ended."""


class _NoSpan:
    @property
    def traceparent(self) -> str:
        """None."""
        return ""

    def event(self, name: str) -> None:
        """Do nothing."""

    def end(self, error: str | None = None, **attributes: Attribute | None) -> None:
        """Do nothing."""


class _NoTracer:
    @property
    def is_on(self) -> bool:
        """False."""
        return False

    def start_span(self, traceparent: str, start_ns: int) -> Span:
        """The span that does nothing."""
        del traceparent, start_ns
        return NO_SPAN

    def close(self) -> None:
        """Do nothing."""


NO_SPAN: Final[Span] = _NoSpan()
NO_TRACER: Final[Tracer] = _NoTracer()
