# SPDX-License-Identifier: Apache-2.0
"""Objects from process to process: their large arrays lie in memory that the receiver maps, and are copied once.

The memory has no name, so nothing is left of it when both processes end.
"""

from __future__ import annotations

import mmap
import os
import pickle
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, BinaryIO

_RECEIVER_UNKNOWN = 0
"""The process id that `send_handle` wants on Windows alone."""


def put(link: Connection, thing: object) -> None:
    """Send an object that can be pickled.

    Raises:
        OSError: the other end is closed.
    """
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(thing, protocol=5, buffer_callback=buffers.append)
    pieces = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    with os.fdopen(os.memfd_create("omni-parcel"), "wb", buffering=0) as file:
        for piece in pieces:
            _write(file, piece)
        link.send([len(piece) for piece in pieces])
        send_handle(link, file.fileno(), _RECEIVER_UNKNOWN)


def take(link: Connection) -> Any:
    """Receive the next object; its arrays are mapped, can be written to, and keep the memory for as long as they live.

    Raises:
        EOFError: the other end was closed, or its process ended.
    """
    sizes: list[int] = link.recv()
    handle = _handle(link)
    try:
        mapped = memoryview(mmap.mmap(handle, sum(sizes), access=mmap.ACCESS_COPY))
    finally:
        os.close(handle)
    pieces, end = list[memoryview](), 0
    for size in sizes:
        pieces.append(mapped[end : end + size])
        end += size
    return pickle.loads(pieces[0], buffers=pieces[1:])


def _handle(link: Connection) -> int:
    try:
        return recv_handle(link)
    except RuntimeError as error:  # the end of the stream in the place of a handle
        raise EOFError from error


def _write(file: BinaryIO, piece: memoryview) -> None:
    while piece:
        piece = piece[file.write(piece) :]
