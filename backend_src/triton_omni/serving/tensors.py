# SPDX-License-Identifier: Apache-2.0
"""Named tensors to Triton's and back, by DLPack: the one place where tensors cross into or out of Triton.

`LinkCounter` counts what arrives by device, so that a test can prove that rows and codes never touched the host on a
GPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from triton_omni.answer import Sent

if TYPE_CHECKING:
    import torch

    from triton_omni.wire import Value

RAW_TENSORS: Final = frozenset({"META"})
"""Tensors of a link that are bytes, UINT8 [N] to Triton: its own byte strings cost several times as much, since the
Python backend packs and unpacks those in Python. A Triton tensor itself cannot be asked for its type.
"""


class LinkCounter:
    """Tensors and bytes received, by tensor name and device type. Written by Triton's thread, read by any."""

    def __init__(self) -> None:
        self._bytes: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, tensor: torch.Tensor) -> None:
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
                self._counter.add(name, value)
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

    # torch gives no tensor of another device than the thread's current one, which is device 0 where none was chosen.
    with torch.cuda.device(value.device) if value.is_cuda else contextlib.nullcontext():
        return pb_utils.Tensor.from_dlpack(name, value.contiguous())


def write_tensors(pb_utils: Any, values: Mapping[str, Sent]) -> list[Any]:
    """All outputs of one response."""
    return [write_tensor(pb_utils, name, value) for name, value in values.items()]


def read_bytes(request: Any, names: Iterable[str]) -> dict[str, list[bytes] | None]:
    """BYTES inputs of a client's request as lists; None = not given."""
    given = {tensor.name(): tensor for tensor in request.inputs()}
    return {
        name: [bytes(item) for item in given[name].as_numpy().reshape(-1)] if name in given else None for name in names
    }
