# SPDX-License-Identifier: Apache-2.0
"""Choose a stage's device without importing torch; Triton completes a model's configuration before load."""

from __future__ import annotations

import ctypes
from typing import Literal

from triton_omni.core.settings import Device, Dtype, SettingsError


def gpu_count() -> int:
    """GPUs that the driver shows to this process; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def resolve_device(device: Device) -> Literal["cpu", "cuda"]:
    """`auto` is the GPU where there is one.

    Raises:
        SettingsError: a GPU is asked for by name and there is none.
    """
    if device == "cuda" and not gpu_count():
        raise SettingsError("device: cuda, but the driver shows no GPU to this process")
    if device == "auto":
        return "cuda" if gpu_count() else "cpu"
    return device


def resolve_dtype_name(dtype: Dtype, device: Literal["cpu", "cuda"]) -> Literal["float32", "bfloat16", "float16"]:
    """`auto` is bfloat16 on a GPU and float32 on the CPU, where it is exact with the reference."""
    if dtype == "auto":
        return "bfloat16" if device == "cuda" else "float32"
    return dtype
