# SPDX-License-Identifier: Apache-2.0
"""The gateway's own figures, in Prometheus' text form; the Triton server has an endpoint of its own for the stages'."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from triton_omni_client import Timings

_SECONDS = (0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30, 60, 120)


class Metrics:
    """Figures of one gateway."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "omni_gateway_requests",
            "Answered requests; status 499: the caller left before its answer was complete.",
            ("endpoint", "status"),
            registry=self._registry,
        )
        self.in_flight = Gauge(
            "omni_gateway_requests_in_flight", "Requests under way to the model.", registry=self._registry
        )
        self.servers_ready = Gauge(
            "omni_gateway_servers_ready", "Triton servers that take requests.", registry=self._registry
        )
        self.sessions = Gauge("omni_gateway_realtime_sessions", "Open realtime sessions.", registry=self._registry)
        self._responses = Counter(
            "omni_gateway_realtime_responses",
            "Responses of realtime sessions that ended, and why.",
            ("status", "reason"),
            registry=self._registry,
        )
        self.moved = Counter(
            "omni_gateway_moved_requests",
            "Requests that another server was asked for, since the one before did not take them.",
            registry=self._registry,
        )
        self._seconds = self._histogram("request", "From a request to the end of its answer.")
        self._first_text = self._histogram("first_text", "From asking the Triton server to its first text.")
        self._first_audio = self._histogram("first_audio", "From asking the Triton server to its first audio.")
        self.recorded = Counter(
            "omni_gateway_recording_seconds", "Sound written down or translated, in seconds.", registry=self._registry
        )
        self._audio = Counter("omni_gateway_audio_seconds", "Speech received, in seconds.", registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"omni_gateway_{name}_seconds", text, buckets=_SECONDS, registry=self._registry)

    def answered(self, endpoint: str, status: int, seconds: float) -> None:
        """Count an answer that has ended."""
        self._requests.labels(endpoint, str(status)).inc()
        self._seconds.observe(seconds)

    def responded(self, status: str, reason: str) -> None:
        """Count a response of a session that has ended."""
        self._responses.labels(status, reason).inc()

    def replied(self, timings: Timings) -> None:
        """Count what came of a reply, whole or cut off."""
        if timings.first_text is not None:
            self._first_text.observe(timings.first_text)
        if timings.first_audio is not None:
            self._first_audio.observe(timings.first_audio)
        self._audio.inc(timings.audio)

    def text(self) -> bytes:
        """All figures."""
        return generate_latest(self._registry)
