# SPDX-License-Identifier: Apache-2.0
"""Media in shared memory for an event loop: threads make and release what `shared_media.py` has, and no loop waits.

Copying media takes time, and a region may be in use for a while after its request.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2_grpc  # type: ignore[import-untyped]
from tritonclient.utils.shared_memory import SharedMemoryException  # type: ignore[import-untyped]

from .errors import OmniClientError
from .messages import Tensor
from .protocol import MAX_MESSAGE_BYTES, channel_options
from .shared_media import SharedMedia


class AsyncSharedMedia:
    """`SharedMedia` that is on its way; to be made where the loop is running."""

    def __init__(self, threads: ThreadPoolExecutor, stub: Any, tensor: Tensor) -> None:
        self._loop = asyncio.get_running_loop()
        self._threads = threads
        self._made = threads.submit(_made, stub, tensor)
        self._released = False

    async def made(self) -> SharedMedia:
        """The region, once the server knows it.

        Raises:
            BadRequest: this machine's shared memory has no room for the tensor, or the server takes no regions.
            OmniClientError: the server does not find the region.
        """
        # Shielded: whoever stops waiting takes it from nobody else.
        found = await asyncio.shield(asyncio.wrap_future(self._made))
        if isinstance(found, Exception):
            raise found
        return found

    async def released(self) -> None:
        """Return when the memory is given back."""
        if (done := self.release()) is not None:
            await asyncio.wrap_future(done)

    def release(self) -> Future[None] | None:
        """Have the memory given back; None if that was asked for before."""
        if self._released:
            return None
        self._released = True
        return self._threads.submit(self._give_back)

    def forget(self) -> None:
        """`release` by the collector of garbage, which may come while a lock of the threads is held, or at the end."""
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self.release)
        elif not self._released:
            self._give_back()

    def _give_back(self) -> None:
        self._made.add_done_callback(_release_made)


def _made(stub: Any, tensor: Tensor) -> SharedMedia | Exception:
    """The region, or what went wrong: a future's own error that a cancelled task never takes would be complained of."""
    try:
        return SharedMedia(stub, tensor)
    # A ValueError is gRPC's for a channel that was closed meanwhile.
    except (OmniClientError, SharedMemoryException, OSError, ValueError) as error:
        return error


def _release_made(made: Future[SharedMedia | Exception]) -> None:
    if made.exception() is None and isinstance(found := made.result(), SharedMedia):
        found.release()


class Sharing:
    """Makes the regions of one client's requests.

    Args:
        url: host and port of Triton's gRPC endpoint.
        credentials: TLS credentials, as the client's.
    """

    def __init__(self, url: str, credentials: grpc.ChannelCredentials | None) -> None:
        options = channel_options(MAX_MESSAGE_BYTES)
        self._channel = (
            grpc.insecure_channel(url, options=options)
            if credentials is None
            else grpc.secure_channel(url, credentials, options=options)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._threads = ThreadPoolExecutor(thread_name_prefix="omni-shared-media")

    def begin(self, tensor: Tensor) -> AsyncSharedMedia:
        """Have a tensor's region made."""
        return AsyncSharedMedia(self._threads, self._stub, tensor)

    async def close(self) -> None:
        """Return when all that was released is given back."""
        await asyncio.to_thread(self._threads.shutdown)
        self._channel.close()
