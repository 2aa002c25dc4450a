# SPDX-License-Identifier: Apache-2.0
"""A sound device for the client's tests, in the place of the package `sounddevice`: it notes what it plays."""

from __future__ import annotations

import sys
import threading
import time
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray


class PortAudioError(Exception):
    """As sounddevice's."""


class SoundDevice:
    """One device; `speed` is how much faster than sound it plays, None at once."""

    latency = 0.02

    def __init__(self, speed: float | None = None) -> None:
        self.speed = speed
        self.written: list[NDArray[np.float32]] = []
        self.opened: dict[str, Any] = {}
        self.closed = False
        self.broken = threading.Event()

    @property
    def played(self) -> NDArray[np.float32]:
        """All samples so far."""
        return np.concatenate([np.zeros(0, np.float32), *self.written])

    def open(self, **options: Any) -> SoundDevice:
        """`sounddevice.OutputStream`."""
        self.opened = options
        return self

    def start(self) -> None:
        pass

    def write(self, data: NDArray[np.float32]) -> None:
        if self.broken.is_set():
            raise PortAudioError("Device unavailable")
        assert data.shape[1:] == (1,)
        assert data.dtype == np.float32
        if self.speed is not None:
            time.sleep(len(data) / 24_000 / self.speed)
        self.written.append(data[:, 0].copy())

    def close(self) -> None:
        self.closed = True


def plug_in(monkeypatch: pytest.MonkeyPatch, device: SoundDevice) -> SoundDevice:
    """Make `import sounddevice` find this device."""
    module: Any = ModuleType("sounddevice")
    module.OutputStream = device.open
    module.PortAudioError = PortAudioError
    monkeypatch.setitem(sys.modules, "sounddevice", module)
    return device
