# SPDX-License-Identifier: Apache-2.0
"""Streams and events of a GPU, copies that the host does not wait for, the thread that steps an engine, and rounding.

The CPU has no streams: work there is done when it returns.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def record_event(device: torch.device, *, blocking: bool = False, timing: bool = False) -> torch.cuda.Event | None:
    """Mark the present point of the device's current stream; None on the CPU, where work is done when it returns.

    A thread that waits for a `blocking` event sleeps; otherwise it would keep a core busy. The time between two events
    with `timing` can be asked once the device has reached both.
    """
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=timing, blocking=blocking)  # type: ignore[no-untyped-call]
    # By default an event is recorded on the thread's current device, which is device 0 in a thread that chose none.
    event.record(torch.cuda.current_stream(device))
    return event


def settle_thread(device: torch.device) -> None:
    """Make the calling thread the one that steps an engine.

    On a GPU it gets a stream of its own. Triton's Python backend exports and copies GPU tensors on CUDA's legacy
    default stream (`PbTensor::FromDLPack`, `PbMemory::CopyBuffer`), from other threads: a message would wait there for
    the engine's step that was launched meanwhile. Streams of torch's pool and the legacy one do not wait for each
    other.

    On the CPU it gets the process's number of threads for one operation. OpenMP keeps that number for each thread, and
    torch sets it at a thread's first parallel operation, which may be in a step whose attention vLLM has planned with
    another number.
    """
    if device.type != "cuda":
        torch.get_num_threads()
        return
    torch.cuda.set_device(device)
    # The networks were made on the default stream.
    torch.cuda.synchronize(device)
    torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


@functools.lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def on_side_stream(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """Run small work on a side stream: on the engine's stream it would wait for the step that is already launched.
    On the CPU it gives None and does nothing.
    """
    if device.type != "cuda":
        yield None
        return
    stream = _side_stream(device)
    with torch.cuda.stream(stream):
        yield stream


def await_side_stream(device: torch.device) -> None:
    """Wait until all work on the side stream is done."""
    if device.type == "cuda":
        _side_stream(device).synchronize()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device`, in the order of its current stream; on the CPU return the tensor itself."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def fill(target: Tensor, tensor: Tensor) -> None:
    """Copy a host tensor into one of the same shape, as `to_device`."""
    target.copy_(tensor.pin_memory() if target.is_cuda else tensor, non_blocking=True)


def upload(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> tuple[Tensor, ...]:
    """Return host arrays [N] as int64 tensors on `device`, by one copy."""
    return torch.split(to_device(torch.from_numpy(np.concatenate(arrays)), device), [len(array) for array in arrays])


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host, valid once the stream has run; on the CPU return the tensor itself."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


# --- rounding ---------------------------------------------------------------------------------------------------------


def use_full_float32(device: torch.device) -> None:
    """Keep cuDNN's convolutions and cuBLAS' products of float32 from rounding their inputs to TF32's 10 bits: that mode
    is compared with the reference.

    For the whole process, which serves one stage. Nothing to do on the CPU.
    """
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False


def use_ordered_sums(device: torch.device) -> None:
    """Keep cuDNN and cuBLAS from algorithms whose results vary from run to run, such as sums by atomic additions.

    For the whole process, before its first product on the GPU. Nothing to do on the CPU, whose libraries have none for
    one shape and number of threads.
    """
    if device.type == "cuda":
        torch.backends.cudnn.deterministic = True
        # Without it cuBLAS may take another algorithm while several streams share its workspace.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
