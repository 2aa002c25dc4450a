# SPDX-License-Identifier: Apache-2.0
"""Triton's entry point of token2wav; the code is in `triton_omni.stub`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from triton_omni.stub import launch

# Not resolved: under a profile this file is a link to the original, and has other settings beside it.
FOLDER = Path(__file__).parent


class TritonPythonModel:
    """The three methods that Triton's Python backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the stage."""
        self._adapter = launch.start_token2wav(pb_utils, args, FOLDER)

    def execute(self, requests: list[Any]) -> None:
        """Accept requests; each is answered through its own sender."""
        self._adapter.execute(requests)

    def finalize(self) -> None:
        """End every session and release the device."""
        launch.end_process(self._adapter.close)
