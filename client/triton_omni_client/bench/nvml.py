# SPDX-License-Identifier: Apache-2.0
"""Memory and utilisation of the NVIDIA GPUs that this process sees, by GPU and by stage, through NVML (`nvidia-ml-py`).

A process belongs to the stage whose model folder its command line names.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable
from typing import Any, Self

STAGES = ("thinker", "talker", "token2wav")
OTHER = "other"
"""Name for any other process on the GPU: tritonserver itself, or a stranger's."""

_Figure = Callable[[int, Any], dict[str, float]]

_MIB = 2**20
_PERCENT = 100


class NvmlError(Exception):
    """NVML is not installed, or there is no NVIDIA driver here."""


def stage_of(pid: int) -> str:
    """The stage that a process of this machine works for."""
    import psutil

    try:
        arguments = psutil.Process(pid).cmdline()
    except psutil.Error:
        return OTHER
    return next((stage for stage in STAGES if any(f"/{stage}/" in one for one in arguments)), OTHER)


class Nvml:
    """A session with the driver, for the GPUs that `CUDA_VISIBLE_DEVICES` names, or all; GPU 0 is the first of them.

    Args:
        library: the module `pynvml`; None imports it.
        stage: tells the stage of a process id.

    Raises:
        NvmlError: there is no driver, or `nvidia-ml-py` or `psutil` is not installed.
    """

    def __init__(self, library: Any = None, stage: Callable[[int], str] = stage_of) -> None:
        try:
            importlib.import_module("psutil")  # for `stage_of`
            self._nvml = importlib.import_module("pynvml") if library is None else library
        except ImportError as error:
            name = {"pynvml": "nvidia-ml-py"}.get(error.name or "", error.name)
            raise NvmlError(f"{name} is not installed (pip install nvidia-ml-py psutil)") from error
        try:
            self._nvml.nvmlInit()
            self._devices = self._visible_devices()
        except self._nvml.NVMLError as error:
            raise NvmlError(f"no NVIDIA GPU could be asked here ({error})") from error
        self._stage = stage
        self._seen_us = [0] * len(self._devices)

    def _visible_devices(self) -> list[Any]:
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        if chosen is None:
            return [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(self._nvml.nvmlDeviceGetCount())]
        # As CUDA: a name that is none ends the list.
        named = itertools.takewhile(lambda name: name not in ("", "-1"), (name.strip() for name in chosen.split(",")))
        return [
            self._nvml.nvmlDeviceGetHandleByIndex(int(name))
            if name.isdecimal()
            else self._nvml.nvmlDeviceGetHandleByUUID(name)
            for name in named
        ]

    def gpus(self) -> list[str]:
        """Names of the GPUs."""
        names = [self._nvml.nvmlDeviceGetName(device) for device in self._devices]
        return [name.decode() if isinstance(name, bytes) else str(name) for name in names]

    def sample(self) -> dict[str, float]:
        """The figures of this moment: `gpu/0/memory_mib`, `gpu/0/utilization` (0 to 1), and by stage the same.

        A stage's utilisation is that of the streaming multiprocessors since the last sample, by NVML's own account.
        Figures that the driver does not give are left out.
        """
        found: dict[str, float] = {}
        for index, device in enumerate(self._devices):
            for figure in (self._memory, self._utilization, self._stage_memory, self._stage_utilization):
                for name, value in self._supported(figure, index, device).items():
                    found[name] = found.get(name, 0.0) + value  # a stage may work on several GPUs
        return found

    def _supported(self, figure: _Figure, index: int, device: Any) -> dict[str, float]:
        try:
            return figure(index, device)
        except self._nvml.NVMLError:
            return {}  # not every driver tells everything, nor tells it to everybody

    def _memory(self, index: int, device: Any) -> dict[str, float]:
        return {f"gpu/{index}/memory_mib": self._nvml.nvmlDeviceGetMemoryInfo(device).used / _MIB}

    def _utilization(self, index: int, device: Any) -> dict[str, float]:
        rates = self._nvml.nvmlDeviceGetUtilizationRates(device)
        return {f"gpu/{index}/utilization": rates.gpu / _PERCENT}

    def _stage_memory(self, _index: int, device: Any) -> dict[str, float]:
        found: dict[str, float] = {}
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(device):
            name = f"stage/{self._stage(process.pid)}/memory_mib"
            found[name] = found.get(name, 0.0) + (process.usedGpuMemory or 0) / _MIB
        return found

    def _stage_utilization(self, index: int, device: Any) -> dict[str, float]:
        found: dict[str, float] = {}
        samples = self._nvml.nvmlDeviceGetProcessUtilization(device, self._seen_us[index])
        latest = {sample.pid: sample for sample in sorted(samples, key=lambda sample: sample.timeStamp)}
        for pid, sample in latest.items():
            name = f"stage/{self._stage(pid)}/utilization"
            found[name] = found.get(name, 0.0) + sample.smUtil / _PERCENT
            self._seen_us[index] = max(self._seen_us[index], sample.timeStamp)
        return found

    def close(self) -> None:
        """End the session."""
        self._nvml.nvmlShutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
