# SPDX-License-Identifier: Apache-2.0
"""Silero's published detector of speech, run by ONNX Runtime.

Both come with the extra `realtime`, by Pipecat's package: Silero's own would bring torch, which nothing here needs.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from .turns import CHUNK_SAMPLES

CURE: Final = "pip install 'triton-omni-gateway[realtime]'"
_CONTEXT = 64
"""Samples before each chunk that the network reads again."""
_PACKAGE, _FILE = "pipecat", "audio/vad/data/silero_vad.onnx"
_RATE = 16_000


def _file() -> Path | None:
    package = find_spec(_PACKAGE)
    if package is None or package.origin is None:
        return None
    file = Path(package.origin).parent / _FILE
    return file if file.is_file() else None


@functools.cache
def is_installed() -> bool:
    """True if the extra is there."""
    return find_spec("onnxruntime") is not None and _file() is not None


@functools.cache
def _network() -> Any:
    """The network, loaded once for all sessions, which keep their states themselves."""
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(_file(), options, providers=["CPUExecutionProvider"])


class SileroVoice:
    """One stream of sound. A chunk takes 0.1 ms."""

    def __init__(self) -> None:
        self._network = _network()
        self.reset()

    def reset(self) -> None:
        """Forget what was heard."""
        self._state = np.zeros((2, 1, 128), np.float32)
        self._context = np.zeros((1, _CONTEXT), np.float32)

    def probability(self, pcm: bytes) -> float:
        """That the next 512 samples, PCM16 at 16 kHz, are speech."""
        samples = np.frombuffer(pcm, "<i2", CHUNK_SAMPLES).astype(np.float32)[None] / 32768
        given = np.concatenate([self._context, samples], axis=1)
        self._context = given[:, -_CONTEXT:]
        inputs = {"input": given, "state": self._state, "sr": np.array(_RATE, np.int64)}
        found, self._state = self._network.run(None, inputs)
        return float(found[0, 0])
