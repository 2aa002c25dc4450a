# SPDX-License-Identifier: Apache-2.0
"""How a call is left whose answer is there: after its end, not in the moment before, and not long after either.

Triton 24.10 never frees a request, nor what it brought, whose gRPC stream is cancelled between its error and its end.
And it never ends a stream that a process had a part in which died when the reply was whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any, Final

import grpc  # type: ignore[import-untyped]

SETTLED_WITHIN_S: Final = 1.0
"""After an error, an end that does not come so soon is not waited for."""
LATE_END_S: Final = 2.0
"""Nor after a whole reply."""


def settle(call: Any) -> None:
    """Wait for the end of a call of `grpc`; from any thread."""
    ended = threading.Event()
    if call.add_callback(ended.set):
        ended.wait(SETTLED_WITHIN_S)


def cancel_late(call: Any) -> threading.Timer:
    """Have a call end that is whole, in a while if it does not by itself; to be cancelled when it has."""
    timer = threading.Timer(LATE_END_S, call.cancel)
    timer.daemon = True
    timer.start()
    return timer


async def read_end(call: Any) -> Any:
    """Return the next answer after a whole reply on a `grpc.aio` call; `EOF` where none comes for a while."""
    try:
        return await asyncio.wait_for(call.read(), LATE_END_S)
    except TimeoutError:
        return grpc.aio.EOF


async def settle_async(call: Any) -> None:
    """Wait for the end of a call of `grpc.aio`."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(call.code(), SETTLED_WITHIN_S)
