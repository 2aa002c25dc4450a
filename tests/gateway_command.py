# SPDX-License-Identifier: Apache-2.0
"""The gateway's command as a process, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import triton_omni_gateway
from client_fakes import FakeTriton

FOLDERS = [Path(triton_omni_gateway.__file__).parents[1], Path(__file__).parents[1] / "client"]


@contextmanager
def started(triton: FakeTriton, *options: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, FOLDERS))}
    command = [sys.executable, "-m", "triton_omni_gateway", "--port", "0", "--url", triton.url, *options]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()
