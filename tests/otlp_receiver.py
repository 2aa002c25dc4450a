# SPDX-License-Identifier: Apache-2.0
"""A collector of OpenTelemetry spans on loopback, as small as one can be: OTLP over HTTP, kept in memory."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Receiver:
    """Requests received so far."""

    url: str
    received: list[ExportTraceServiceRequest] = field(default_factory=list)

    def spans(self) -> list[Any]:
        """All spans, in the order in which they came."""
        return [
            span
            for request in list(self.received)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def of_trace(self, trace_id: str) -> dict[str, Any]:
        """Spans of one trace by name."""
        return {span.name: span for span in self.spans() if span.trace_id.hex() == trace_id}

    def services(self) -> set[str]:
        """Names of the services that sent some."""
        return {
            attribute.value.string_value
            for request in list(self.received)
            for resource in request.resource_spans
            for attribute in resource.resource.attributes
            if attribute.key == "service.name"
        }


def attributes(span: Any) -> dict[str, Any]:
    """A span's attributes as plain values."""
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


@contextmanager
def receive_spans() -> Iterator[Receiver]:
    """Listen on a free port until the end."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            receiver.received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(f"http://127.0.0.1:{listening.server_address[1]}")
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()
