# SPDX-License-Identifier: Apache-2.0
"""Converts named tensors to Triton's and back, by DLPack: the only place where tensors cross into or out of Triton.

`LinkCounter` counts what arrives by device, so that a test can prove that rows and codes never touched the host on a
GPU.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from triton_omni.core.errors import TooLarge
from triton_omni.core.settings import MOST_MEDIA_ITEMS
from triton_omni.session.answer import Sent

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from triton_omni.session.wire import Value

RAW_TENSORS: Final = frozenset({"META"})
"""Tensors of a link that are bytes, UINT8 [N] to Triton: its own byte strings cost several times as much, since the
Python backend packs and unpacks those in Python. A Triton tensor itself cannot be asked for its type.
"""

_LENGTH_BYTES: Final = 4


class LinkCounter:
    """Tensors and bytes received, by tensor name and device type. Written by Triton's thread, read by any."""

    def __init__(self) -> None:
        self._bytes: Counter[tuple[str, str]] = Counter()

    def count(self, name: str, tensor: torch.Tensor) -> None:
        """Count one received tensor."""
        self._bytes[name, tensor.device.type] += tensor.numel() * tensor.element_size()

    def snapshot(self) -> dict[tuple[str, str], int]:
        """Bytes so far, by (tensor name, device type)."""
        return dict(self._bytes)


def read_tensor(tensor: Any) -> Value:
    """One input of a link: bytes for META, else a torch tensor on its device."""
    if tensor.name() in RAW_TENSORS:
        return bytes(tensor.as_numpy().tobytes())
    import torch

    shape = tuple(tensor.shape())
    return torch.empty(shape) if 0 in shape else _own(torch.utils.dlpack.from_dlpack(tensor))


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A finished copy within the device.

    Triton's Python backend gives the device memory of a request's inputs to the next request as soon as `execute`
    returns, however long the request stays open. (Inputs on the CPU live in shared memory, which is counted.)
    """
    if not tensor.is_cuda:
        return tensor
    import torch

    stream = _copy_stream(tensor.device)
    with torch.cuda.stream(stream):
        copy = tensor.clone()
    stream.synchronize()
    return copy


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that waits for no kernel of the engine."""
    import torch

    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class LinkInputs(Mapping[str, "Value"]):
    """The inputs of one Triton request by name. Each is read when it is asked for: a message that no stage sent costs
    no copy on the device.
    """

    def __init__(self, request: Any, counter: LinkCounter) -> None:
        self._inputs = {tensor.name(): tensor for tensor in request.inputs()}
        self._counter = counter
        self._values: dict[str, Value] = {}

    def __getitem__(self, name: str) -> Value:
        if name not in self._values:
            value = self._values[name] = read_tensor(self._inputs[name])
            if not isinstance(value, bytes):
                self._counter.count(name, value)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._inputs)

    def __len__(self) -> int:
        return len(self._inputs)


def write_tensor(pb_utils: Any, name: str, value: Sent) -> Any:
    """One Triton output; a torch tensor is given by DLPack and must stay unchanged until the response has left."""
    if isinstance(value, bytes):
        raw = name in RAW_TENSORS
        array = np.frombuffer(value, dtype=np.uint8) if raw else np.array([value], dtype=np.object_)
        return pb_utils.Tensor(name, array)
    if isinstance(value, np.ndarray):
        return pb_utils.Tensor(name, value)
    import torch

    # torch exports no tensor of another device than the thread's current one, which is device 0 by default.
    with torch.cuda.device(value.device) if value.is_cuda else contextlib.nullcontext():
        return pb_utils.Tensor.from_dlpack(name, value.contiguous())


def write_tensors(pb_utils: Any, values: Mapping[str, Sent]) -> list[Any]:
    """All outputs of one response."""
    return [write_tensor(pb_utils, name, value) for name, value in values.items()]


def read_bytes(request: Any, names: Iterable[str]) -> dict[str, list[bytes] | None]:
    """BYTES inputs of a client's request as lists; None = not given.

    Raises:
        TooLarge: one has more than `MOST_MEDIA_ITEMS` elements.
    """
    given = {tensor.name(): tensor for tensor in request.inputs()}
    return {
        name: [bytes(item) for item in read_strings(given[name]).reshape(-1)] if name in given else None
        for name in names
    }


def read_strings(tensor: Any) -> NDArray[np.object_]:
    """The elements of a BYTES input of a client's request; they are counted before anything is made of them.

    Raises:
        TooLarge: they are more than `MOST_MEDIA_ITEMS`.
    """
    count = math.prod(tensor.shape())
    if count > MOST_MEDIA_ITEMS:
        raise TooLarge(f"{tensor.name()}: {count} elements, the limit of any deployment is {MOST_MEDIA_ITEMS}")
    strings: NDArray[np.object_] = tensor.as_numpy()
    return strings


def bound_strings(pb_utils: Any) -> None:
    """Have Triton's backend unpack `MOST_MEDIA_ITEMS` elements of a BYTES input at most.

    Triton up to 25.10 unpacks all inputs of all requests by this function of its module, before `execute` is called.
    """
    pb_utils.deserialize_bytes_tensor = unpack_strings


def unpack_strings(encoded: NDArray[np.uint8]) -> NDArray[np.object_]:
    """Return the elements of a BYTES tensor; one with too many stays unread, with a shape that `read_strings` refuses.

    Args:
        encoded: uint8 [N]; each element is its length as little-endian uint32, then its bytes.
    """
    view, at = encoded.data, 0
    strings: list[bytes] = []
    while at < len(view):
        if len(strings) == MOST_MEDIA_ITEMS:
            return np.empty(0, np.object_).view(_Unread)
        begin = at + _LENGTH_BYTES
        at = begin + int.from_bytes(view[at:begin], "little")
        strings.append(bytes(view[begin:at]))
    return np.array(strings, np.object_)


class _Unread(np.ndarray[Any, Any]):
    """Takes the place of a tensor that was not unpacked; it accepts any shape and has no memory."""

    def reshape(self, *shape: Any, **_: Any) -> Any:
        """The backend reshapes unpacked strings to the client's shape in this way."""
        return np.broadcast_to(np.array(b"", np.object_), *shape)
