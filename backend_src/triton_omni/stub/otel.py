# SPDX-License-Identifier: Apache-2.0
"""Spans to an OpenTelemetry collector, by OTLP over HTTP; imported only where one is configured (`launch.make_tracer`).

Attributes are names, codes and figures; never content.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from triton_omni.core.errors import StageName
from triton_omni.core.tracing import Attribute, Span

_SERVICE: Final = "triton-omni"
_TRACEPARENT: Final = "traceparent"


def exporting_provider(environment: Mapping[str, str]) -> TracerProvider:
    """Exports by a thread of its own; endpoint, headers, sampling and batches are those of the environment."""
    resource = Resource.create()
    if not environment.get("OTEL_SERVICE_NAME") and SERVICE_NAME not in environment.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        resource = resource.merge(Resource({SERVICE_NAME: _SERVICE}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class OtelTracer:
    """Spans of one stage.

    Args:
        stage: the spans' name.
        provider: exports them; shut down at `close`.
    """

    is_on = True

    def __init__(self, stage: StageName, provider: TracerProvider) -> None:
        self._stage = stage
        self._provider = provider
        self._tracer = provider.get_tracer("triton_omni")
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER if stage == "thinker" else SpanKind.INTERNAL

    def start_span(self, traceparent: str, start_ns: int) -> Span:
        """Begin a span under `traceparent`, or a new trace if that is no valid W3C header."""
        # A context of its own, since the thread's may belong to another request.
        parent = self._propagator.extract({_TRACEPARENT: traceparent}, Context())
        start = time.time_ns() - (time.monotonic_ns() - start_ns)
        span = self._tracer.start_span(self._stage, parent, self._kind, start_time=start)
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span, Context()))
        return _Span(span, carrier.get(_TRACEPARENT, ""))

    def close(self) -> None:
        """Export what has ended, and end the exporting thread."""
        self._provider.shutdown()


class _Span:
    def __init__(self, span: OtelSpan, traceparent: str) -> None:
        self._span = span
        self._traceparent = traceparent

    @property
    def traceparent(self) -> str:
        """W3C's header of this span."""
        return self._traceparent

    def event(self, name: str) -> None:
        """Record an event now."""
        self._span.add_event(name)

    def end(self, error: str | None = None, **attributes: Attribute | None) -> None:
        """End the span now."""
        self._span.set_attributes({f"omni.{name}": value for name, value in attributes.items() if value is not None})
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()
