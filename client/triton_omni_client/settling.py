# SPDX-License-Identifier: Apache-2.0
"""How a call is left that was answered with an error: after its end, not in the moment before.

Triton 24.10 never frees a request, nor what it brought, whose gRPC stream is cancelled between its error and its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any, Final

SETTLED_WITHIN_S: Final = 1.0
"""An end that does not come so soon is not waited for."""


def settle(call: Any) -> None:
    """Wait for the end of a call of `grpc`; from any thread."""
    ended = threading.Event()
    if call.add_callback(ended.set):
        ended.wait(SETTLED_WITHIN_S)


async def settle_async(call: Any) -> None:
    """Wait for the end of a call of `grpc.aio`."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(call.code(), SETTLED_WITHIN_S)
