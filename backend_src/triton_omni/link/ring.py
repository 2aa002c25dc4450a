# SPDX-License-Identifier: Apache-2.0
"""Memory that a stage shares with the one before it: rows or codes of open sessions go there, past Triton.

One message of Triton costs both sides a millisecond or more, however small it is. The previous stage writes rows or
codes into the session's places of a ring on the device. The ledger holds their number (`link/sender.py`). The
stage that reads owns the ring and offers it in a file beside the ledger's. On a GPU the memory is CUDA's own for
several processes (`cudaIpcGetMemHandle`): it stays until both have left it, so a writer does no
harm if the owner dies. On the CPU it is the file's.

A doorbell tells the reader that the ledger has news: an empty datagram to a socket in the server's folder, which is
open to the server's user alone. A lost datagram loses nothing: without one, a stage looks into the ledger a little
later.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from triton_omni.core.errors import StageName
from triton_omni.core.logs import LastingFailure
from triton_omni.session.server_folder import open_own, own_folder, table_path

_DATA_AT: Final = 4096
"""Offset in bytes of a CPU ring's memory in its file, after the offer."""
_LAZY_PEERS: Final = 1
"""`cudaIpcMemLazyEnablePeerAccess`, the only flag there is."""


class RingError(RuntimeError):
    """The memory cannot be had."""


class _Offer(msgspec.Struct, frozen=True):
    """The description of a ring in its file."""

    epoch: int
    """Epoch of the stage that owns it."""
    device: str
    shape: tuple[int, ...]
    dtype: str
    handle: bytes = b""
    """CUDA IPC handle of the GPU memory."""


@dataclass
class Ring:
    """Places of every slot's session.

    Attributes:
        memory: [slots, places, ...]; place number n of a session is at n modulo `places`.
        epoch: of the stage that owns it.
    """

    memory: Tensor
    epoch: int
    _close: Callable[[], None]
    slots: int = field(init=False)
    """Sessions that have places."""
    places: int = field(init=False)
    """Places of each session."""

    def __post_init__(self) -> None:
        self.slots, self.places = self.memory.shape[:2]
        self._all = self.memory.flatten(0, 1)
        self._singles: dict[int, Tensor] = {}

    def parts(self, slot: int, start: int, count: int) -> list[Tensor]:
        """Places [start, start + count) of a slot in order: one part, or two where they go round; `count` is no more
        than `places`.
        """
        at = start % self.places
        if count == 1:
            return [self._single(slot * self.places + at)]
        own, head = self.memory[slot], min(count, self.places - at)
        parts = [own[at : at + head]]
        return parts if head == count else [*parts, own[: count - head]]

    def _single(self, at: int) -> Tensor:
        """One place of all; kept, for a view takes as long as all else that is done for a row, or a code, of a step."""
        found = self._singles.get(at)
        if found is None:
            found = self._singles[at] = self._all[at : at + 1]
        return found

    def close(self) -> None:
        """Leave the memory; nothing may use it afterwards."""
        self._close()


def offer_ring(
    name: str, stage: StageName, epoch: int, *, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Ring:
    """Make the ring that `stage` reads, and offer it to the stage before.

    Args:
        name: of the ledger's table.
        epoch: of this process of the stage.
        shape: [slots, places] of codes, [slots, places, H] of rows.

    Raises:
        RingError: the device's memory cannot be shared.
        LedgerError: the server's folder is not this user's alone.
    """
    path = own_folder(name) / _path(name, stage).name
    told = (epoch, str(device), shape, str(dtype).removeprefix("torch."))
    size = math.prod(shape) * dtype.itemsize
    if device.type == "cuda":
        memory, handle = _share_on_gpu(size, device)
        _write(path, msgspec.msgpack.encode(_Offer(*told, handle)), 0)
    else:
        _write(path, msgspec.msgpack.encode(_Offer(*told)), size)
        memory = _map_on_cpu(path)

    def close() -> None:
        # Its memory goes with the process, which ends at once: freed before, the other side could be writing to it.
        with contextlib.suppress(OSError, RingError):
            if _read(path).epoch == epoch:
                path.unlink()

    return Ring(memory.view(dtype).view(shape), epoch, close)


def open_ring(name: str, stage: StageName, epoch: int, device: torch.device) -> Ring | None:
    """The ring that the process of `stage` with this epoch offers; None = none, or on another device.

    Raises:
        RingError: it is offered and cannot be had.
        LedgerError: the server's folder is not this user's alone.
    """
    path = _path(name, stage)
    try:
        offer = _read(path)
    except FileNotFoundError:
        return None
    if offer.epoch != epoch or offer.device != str(device):
        return None
    memory, close = _open_on_gpu(offer, device) if offer.handle else (_map_on_cpu(path), lambda: None)
    return Ring(memory.view(getattr(torch, offer.dtype)).view(offer.shape), epoch, close)


def _path(name: str, stage: StageName) -> Path:
    return table_path(name).with_name(f"{stage}-ring")


def _write(path: Path, offer: bytes, size: int) -> None:
    """Whole under a name of its own and then renamed, so that nobody ever sees a half-made one."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(len(offer).to_bytes(2, "little") + offer)
        file.truncate(_DATA_AT + size)
    draft.rename(path)


def _read(path: Path) -> _Offer:
    with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        head = file.read(_DATA_AT)
    try:
        return msgspec.msgpack.decode(head[2 : 2 + int.from_bytes(head[:2], "little")], type=_Offer)
    except msgspec.DecodeError as error:
        raise RingError(f"{path} offers no ring: {error}") from error


def _map_on_cpu(path: Path) -> Tensor:
    with os.fdopen(open_own(path, os.O_RDWR), "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    # The tensor keeps the map, which goes with the last view of it.
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=_DATA_AT)


class _Bytes:
    """Memory of a GPU, as torch takes it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _share_on_gpu(size: int, device: torch.device) -> tuple[Tensor, bytes]:
    runtime = _runtime()
    with torch.cuda.device(device):
        address = int(_checked(runtime.cudaMalloc(size)))
        handle = bytes(bytearray(_checked(runtime.cudaIpcGetMemHandle(address)).reserved))
        memory = torch.as_tensor(_Bytes(address, size), device=device)
        memory.zero_()
        torch.cuda.synchronize(device)
    return memory, handle


def _open_on_gpu(offer: _Offer, device: torch.device) -> tuple[Tensor, Callable[[], None]]:
    runtime = _runtime()
    handle = runtime.cudaIpcMemHandle_t()
    handle.reserved = offer.handle
    with torch.cuda.device(device):
        address = int(_checked(runtime.cudaIpcOpenMemHandle(handle, _LAZY_PEERS)))
    size = math.prod(offer.shape) * getattr(torch, offer.dtype).itemsize
    memory = torch.as_tensor(_Bytes(address, size), device=device)
    return memory, lambda: _checked(runtime.cudaIpcCloseMemHandle(address))


def _runtime() -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise RingError(f"cuda.bindings cannot be imported: {error}") from error
    return runtime


def _checked(result: tuple[Any, ...]) -> Any:
    """Return the result of a CUDA runtime call; raise `RingError` for an error code.

    Raises:
        RingError: it failed.
    """
    error, *values = result
    if int(error):
        raise RingError(f"CUDA says {error.name}")
    return values[0] if values else None


# --- the doorbell -----------------------------------------------------------------------------------------------------


_UNHEARD: Final = (FileNotFoundError, ConnectionRefusedError, BlockingIOError)
"""Errors of a ring that loses nothing: no stage listens, or enough rings wait already."""

logger = logging.getLogger(__name__)


class Doorbell:
    """The bell of one stage: calls `heard` on a thread of its own whenever somebody rang. It takes the place of the
    bell of an earlier process of the stage.

    Args:
        name: of the ledger's table.
        stage: whose bell it is.

    Raises:
        LedgerError: the server's folder is not this user's alone.
        OSError: the socket cannot be made.
    """

    def __init__(self, name: str, stage: StageName, heard: Callable[[], object]) -> None:
        path = own_folder(name) / _file_name(stage)
        self._heard = heard
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            path.unlink(missing_ok=True)
            self._socket.bind(str(path))
        except OSError:
            self._socket.close()
            raise
        self._open = True
        self._thread = threading.Thread(target=self._listen, name=f"omni-{stage}-bell", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hear nothing more."""
        self._open = False
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while self._open:
            try:
                self._socket.recv(1)
            except OSError as error:
                if self._open:  # the loop still polls, at most 50 ms later
                    logger.warning("the doorbell is not heard any more: %s", error)
                return
            if self._open:
                self._heard()


class DoorbellRinger:
    """Rings the bell of a stage.

    Args:
        name: of the ledger's table.
    """

    def __init__(self, name: str, stage: StageName) -> None:
        self._address = str(table_path(name).with_name(_file_name(stage)))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._failure = LastingFailure()

    def ring(self) -> None:
        """Ring; nothing happens if no stage listens, or if enough rings wait already."""
        try:
            self._socket.sendto(b"", self._address)
        except _UNHEARD:
            return
        except OSError as error:
            if self._failure.begins(str(error)):
                logger.warning("a doorbell could not be rung: %s", error)
        else:
            if self._failure.ends():
                logger.warning("a doorbell could be rung again")

    def close(self) -> None:
        """Ring no more."""
        self._socket.close()


def _file_name(stage: StageName) -> str:
    return f"{stage}-bell"
