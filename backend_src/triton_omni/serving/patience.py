# SPDX-License-Identifier: Apache-2.0
"""Builds and preloads `patience.c`, by which Triton outlives stages that stand still or die; its head says why."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from triton_omni.cache_folder import cache_folder
from triton_omni.serving.machine import prepend
from triton_omni.serving.revival import RevivalPolicy

PATIENCE_S: Final = RevivalPolicy().stalled_after_s + 10.0
"""How much longer than its own second Triton waits for a stage that lives; the supervisor ends one that hangs first."""
SCRATCH_VARIABLE: Final = "OMNI_SCRATCH"
_SOURCE: Final = Path(__file__).with_suffix(".c")
_COMPILERS: Final = ("cc", "gcc", "clang")
_COMPILES_WITHIN_S: Final = 60.0


class PatienceError(RuntimeError):
    """The library cannot be had; the message is a sentence that says why."""


def preloaded(environment: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """What to add to the environment of tritonserver; nothing, and a warning, where the library cannot be had.

    Args:
        environment: what it has.
        scratch: the folder for what its Python backend would write to /tmp.
    """
    try:
        library = build_patience(cache_folder() / "native", PATIENCE_S)
    except PatienceError as error:
        print(f"warning: {error}; a stage that stands still or dies may end the server", file=sys.stderr)
        return {}
    return {"LD_PRELOAD": prepend([library], environment.get("LD_PRELOAD", "")), SCRATCH_VARIABLE: str(scratch)}


def build_patience(folder: Path, patience_s: float) -> Path:
    """The shared library for waits that go on for `patience_s` seconds; compiled once for each state of its source.

    Raises:
        PatienceError: there is no C compiler, it fails, or `folder` cannot be written.
    """
    flags = ["-O2", "-shared", "-fPIC", f"-DPATIENCE_MS={round(patience_s * 1000)}"]
    name = hashlib.sha256(repr(flags).encode() + _SOURCE.read_bytes()).hexdigest()[:12]
    library = folder / f"patience-{os.uname().machine}-{name}.so"
    if not library.is_file():
        _compile([*compiler(), *flags, str(_SOURCE), "-ldl"], library)
    return library


def compiler() -> list[str]:
    """The command of a C compiler.

    Raises:
        PatienceError: there is none.
    """
    if given := os.environ.get("CC"):
        return shlex.split(given)
    for name in _COMPILERS:
        if found := shutil.which(name):
            return [found]
    raise PatienceError(f"no C compiler ({', '.join(_COMPILERS)}) is on PATH, nor named by CC")


def _compile(command: list[str], library: Path) -> None:
    """Put the output in its place at once, for whoever compiles the same meanwhile."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder, library.name)
            subprocess.run(
                [*command, "-o", str(made)], check=True, capture_output=True, text=True, timeout=_COMPILES_WITHIN_S
            )
            made.replace(library)
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or [f"it ended with {error.returncode}"]
        raise PatienceError(f"{command[0]} could not compile {_SOURCE.name}: {said[0]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PatienceError(f"{_SOURCE.name} could not be compiled: {error}") from error
