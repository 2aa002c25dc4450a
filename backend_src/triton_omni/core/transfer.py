# SPDX-License-Identifier: Apache-2.0
"""Copies between host and device that the host does not wait for.

A copy from or to memory that is not pinned waits for all that the stream was given before, a batch of windows on its
way for one. Torch keeps pinned memory until the copies that were enqueued with it are done.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`, in the order of its current stream; on the CPU the tensor itself."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def fill(target: Tensor, tensor: Tensor) -> None:
    """Copy a tensor of the host into one of the same shape, on a device as `to_device` does."""
    target.copy_(tensor.pin_memory() if target.is_cuda else tensor, non_blocking=True)


def upload(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> tuple[Tensor, ...]:
    """Arrays [N] each of the host as int64 tensors on `device`, by one copy."""
    return torch.split(to_device(torch.from_numpy(np.concatenate(arrays)), device), [len(array) for array in arrays])


def to_host(tensor: Tensor) -> Tensor:
    """A tensor on the host, valid once the device has come so far; on the CPU the tensor itself."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
