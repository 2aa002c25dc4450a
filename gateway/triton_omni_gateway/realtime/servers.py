# SPDX-License-Identifier: Apache-2.0
"""The Triton servers as sessions see them; `service.py` has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from triton_omni_client import OmniClientError, Request, Retry, Timings
from triton_omni_gateway.errors import GatewayError, Naming
from triton_omni_gateway.pool import PooledStream


class Servers(Protocol):
    """The Triton servers."""

    async def ask(self, request: Request) -> PooledStream:
        """Send a request."""

    def stream(self, request: Request, *, retry: Retry | None = None) -> PooledStream:
        """Send a request that needs no voice."""

    async def explain(self, error: OmniClientError, naming: Naming, request_id: str) -> GatewayError:
        """The meaning of an error."""

    async def request_limits(self) -> Mapping[str, Any]:
        """The server's limits of a request."""

    def replied(self, stream: PooledStream) -> None:
        """Count a reply that ended."""

    def responded(self, response_id: str, status: str, reason: str, seconds: float, timings: Timings | None) -> None:
        """Count and log a response that ended, so many seconds after its beginning."""
