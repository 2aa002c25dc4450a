# SPDX-License-Identifier: Apache-2.0
"""Media of one request in system shared memory: a server on the same machine reads them where they lie.

tritonclient's shared memory, filled and registered for one request and released with it.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
from tritonclient.grpc import service_pb2  # type: ignore[import-untyped]
from tritonclient.utils import shared_memory  # type: ignore[import-untyped]

from .errors import BadRequest
from .messages import Request, Tensor
from .protocol import from_grpc

SHARED_MEMORY = "/dev/shm"
RELEASE_SECONDS = 5.0
"""How long the server may go on to use the region of a request that has ended or was cancelled."""
POLL_SECONDS = 0.01
CALL_SECONDS = 5.0
_FORBIDDEN = ("protocol is restricted", "shared memory is disabled")
"""In what Triton says where it takes none without the operator's key, or (from 26.04 on) none at all."""

logger = logging.getLogger(__name__)


class SharedMedia:
    """A tensor in a region of its own, known to the server by `name`.

    Args:
        stub: of the server's gRPC service.
        tensor: what to share; its bytes are copied.

    Raises:
        BadRequest: this machine's shared memory has no room for the tensor, or the server takes no client's regions.
        OmniClientError: the server does not find the region: it is on another machine.
    """

    def __init__(self, stub: Any, tensor: Tensor) -> None:
        self.name = f"triton_omni_client_{os.getpid()}_{secrets.token_hex(8)}"
        self.size = len(tensor.data)
        self._stub = stub
        self._region = _filled(self.name, tensor)
        try:
            self._register()
        except BaseException:
            # Also what gRPC raises for a channel that was closed meanwhile.
            shared_memory.destroy_shared_memory_region(self._region)
            raise

    def _register(self) -> None:
        request = service_pb2.SystemSharedMemoryRegisterRequest(
            name=self.name, key=f"/{self.name}", offset=0, byte_size=self.size
        )
        try:
            self._stub.SystemSharedMemoryRegister(request, timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            if any(text in (error.details() or "") for text in _FORBIDDEN):
                raise BadRequest(
                    "shared_memory: this server takes no client's shared memory: start it with --client-shared-memory, "
                    "or make the client with shared_memory=False"
                ) from error
            raise from_grpc(error) from error

    def release(self) -> None:
        """Give the memory back, here at once and at the server as soon as the request lets go of it.

        Never raises: the reply is complete by then, or given up. A server that is gone has let go of everything.
        """
        shared_memory.destroy_shared_memory_region(self._region)
        deadline = time.monotonic() + RELEASE_SECONDS
        while not self._unregister(last=time.monotonic() >= deadline):
            time.sleep(POLL_SECONDS)

    def _unregister(self, *, last: bool) -> bool:
        """Return True once the region is unregistered; the server refuses while a request uses it."""
        request = service_pb2.SystemSharedMemoryUnregisterRequest(name=self.name)
        try:
            self._stub.SystemSharedMemoryUnregister(request, timeout=CALL_SECONDS)
        except ValueError:  # the channel was closed
            return True
        except grpc.RpcError as error:
            in_use = error.code() is grpc.StatusCode.INTERNAL
            if in_use and last:
                logger.warning("the server still uses %d bytes of shared memory: %s", self.size, error.details())
            return last or not in_use
        return True


def shared_part(request: Request) -> Tensor | None:
    """The tensor of a request that is worth sharing: its media; None where it brings none.

    Raises:
        BadRequest: the request cannot be expressed.
    """
    return next((tensor for tensor in request.to_tensors() if tensor.name == "media"), None)


def _filled(name: str, tensor: Tensor) -> Any:
    """A region that holds the tensor's bytes."""
    size = len(tensor.data)
    room = os.statvfs(SHARED_MEMORY)
    # Asked before: writing where there is no room ends the process.
    if size > room.f_bavail * room.f_frsize:
        raise BadRequest(f"{tensor.name}: {size} bytes do not fit into {SHARED_MEMORY} of this machine")
    region = shared_memory.create_shared_memory_region(name, f"/{name}", size)
    shared_memory.set_shared_memory_region(region, [np.frombuffer(tensor.data, np.uint8)])
    return region
