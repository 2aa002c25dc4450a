# SPDX-License-Identifier: Apache-2.0
"""Runs programs of others' clients against a gateway, in the environment that `./build.sh test` makes for them.

A program is one of clients/. It is told the gateway's address and a key as its users tell it: by environment variables.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import av
import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".cache" / "clients"
PROGRAMS = Path(__file__).parent / "clients"
SHARED = Path(__file__).parent / "shared"
"""Modules that several programs import."""
KEY = "a-key"
TIMEOUT_S = 150
"""What a program takes on a machine with other work, and more."""


def run_program(name: str, address: str, folder: Path, **environment: str) -> Any:
    """Run a program in `folder`, with this added to its environment; the JSON that it printed last, or None."""
    if not (ENVIRONMENT / "stamp").exists():
        pytest.skip("no clients of others: ./build.sh test fetches them")
    program = PROGRAMS / name
    if program.suffix == ".mjs":
        # A module finds packages beside itself or above; as a text it finds them where node runs.
        (folder / "node_modules").symlink_to(ENVIRONMENT / "node_modules")
        command = [str(Path(sys.executable).with_name("node")), "--input-type=module", "--eval", program.read_text()]
    else:
        command = [str(ENVIRONMENT / "bin" / "python"), str(program)]
    done = subprocess.run(
        ["timeout", str(TIMEOUT_S), *command],
        cwd=folder,
        env=_environment(address, folder) | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    printed = done.stdout.splitlines()
    return json.loads(printed[-1]) if printed else None


def _environment(address: str, folder: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PYTHONPATH": str(SHARED),
        "OPENAI_BASE_URL": f"{address}/v1",
        "OPENAI_API_KEY": KEY,
        # It would ask GitHub for a list of prices.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


def sound_of(path: Path) -> tuple[str, float]:
    """The codec of a file of sound, and its length in seconds."""
    with av.open(str(path)) as file:
        stream = file.streams.audio[0]
        samples = sum(frame.samples for frame in file.decode(stream))
        return stream.codec_context.name, samples / stream.codec_context.sample_rate
