# SPDX-License-Identifier: Apache-2.0
"""Objects from process to process: their large arrays lie in memory that the receiver maps, and are copied once.

The memory has no name, so nothing is left of it when both processes end.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from array import array
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, BinaryIO, Final

_RECEIVER_UNKNOWN = 0
"""The process id that `send_handle` wants on Windows alone."""
_ANSWERS: Final = {
    ("builtins", "RuntimeError"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy.core.numeric", "_frombuffer"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
    ("triton_omni.core.errors", "BadRequest"),
    ("triton_omni.core.errors", "InternalError"),
    ("triton_omni.core.errors", "TooLarge"),
    ("triton_omni.request.media.killable", "OutOfMemory"),
    ("triton_omni.request.media.types", "Audio"),
    ("triton_omni.request.media.types", "image_of"),
    ("triton_omni.request.media.types", "Video"),
}
"""Classes that a decoder's answer may hold; none of them does anything when it is built."""


class UnknownAnswerError(Exception):
    """An object holds something that no decoder answers; the message names it."""


def send_object(link: Connection, thing: object) -> None:
    """Send an object that can be pickled.

    Raises:
        OSError: the other end is closed.
    """
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(thing, protocol=5, buffer_callback=buffers.append)
    pieces = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    with os.fdopen(os.memfd_create("omni-object"), "wb", buffering=0) as file:
        for piece in pieces:
            _write(file, piece)
        link.send_bytes(array("Q", [len(piece) for piece in pieces]))
        send_handle(link, file.fileno(), _RECEIVER_UNKNOWN)


def receive_object(link: Connection) -> Any:
    """Receive the next object of a process that is trusted.

    Raises:
        EOFError: the other end was closed, or its process ended.
    """
    head, *buffers = _receive(link)
    return pickle.loads(head, buffers=buffers)


def receive_answer(link: Connection) -> Any:
    """Receive what a decoder answers, which a file may have taken over: nothing but numbers, texts and media is built.

    Its arrays are mapped, can be written to, and keep the memory for as long as they live.

    Raises:
        EOFError: the other end was closed, or its process ended.
        UnknownAnswerError: it holds anything else.
    """
    head, *buffers = _receive(link)
    try:
        return _Answer(io.BytesIO(head), buffers=buffers).load()
    except pickle.UnpicklingError as error:
        raise UnknownAnswerError(str(error)) from error


class _Answer(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The classes of `_ANSWERS` alone."""
        if (module, name) not in _ANSWERS:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def _receive(link: Connection) -> Sequence[memoryview]:
    sizes = array("Q", link.recv_bytes())
    handle = _handle(link)
    try:
        mapped = memoryview(mmap.mmap(handle, sum(sizes), access=mmap.ACCESS_COPY))
    finally:
        os.close(handle)
    pieces, end = list[memoryview](), 0
    for size in sizes:
        pieces.append(mapped[end : end + size])
        end += size
    return pieces


def _handle(link: Connection) -> int:
    try:
        return recv_handle(link)
    except RuntimeError as error:  # the end of the stream in the place of a handle
        raise EOFError from error


def _write(file: BinaryIO, piece: memoryview) -> None:
    while piece:
        piece = piece[file.write(piece) :]
