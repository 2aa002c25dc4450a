# SPDX-License-Identifier: Apache-2.0
"""Compiles and preloads two C libraries into tritonserver; each is compiled once for a state of its source.

`bounds.c` bounds what callers can make of Triton's front ends. With `stall_guard.c` Triton outlives stages that hang or
die. The comments at the top of both files give the reasons.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from triton_omni.core.arguments import say
from triton_omni.core.cache_folder import cache_folder
from triton_omni.supervisor.machine import prepend
from triton_omni.supervisor.restart import RestartPolicy

_COMPILERS: Final = ("cc", "gcc", "clang")
_COMPILES_WITHIN_S: Final = 60.0
BOUNDS_SOURCE: Final = Path(__file__).with_name("bounds.c")
_UNBOUNDED: Final = (
    "each caller can end the server, and each local user can read requests in /dev/shm: install a C compiler, or name "
    "it by CC"
)
STALL_GUARD_S: Final = RestartPolicy().stalled_after_s + 10.0
"""Seconds that Triton waits for a living stage beyond its own second; the supervisor ends one that hangs sooner."""
SCRATCH_VARIABLE: Final = "OMNI_SCRATCH"
STALL_GUARD_SOURCE: Final = Path(__file__).with_name("stall_guard.c")


class NativeError(RuntimeError):
    """A library cannot be built; the message is a sentence with the reason."""


def with_bounds(environment: Mapping[str, str], body_bytes: int) -> dict[str, str]:
    """Return the environment that `preloading` adds for HTTP bodies of at most `body_bytes`."""
    return preloading(BOUNDS_SOURCE, environment, _UNBOUNDED, BODY_BYTES=body_bytes)


def with_stall_guard(environment: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """Return the environment that `preloading` adds, and `scratch`, the folder for the Python backend's files in
    /tmp.
    """
    without = "a stage that stands still or dies may end the server"
    added = preloading(STALL_GUARD_SOURCE, environment, without, STALL_LIMIT_MS=round(STALL_GUARD_S * 1000))
    return added and {**added, SCRATCH_VARIABLE: str(scratch)}


def preloading(source: Path, environment: Mapping[str, str], without: str, **macros: int) -> dict[str, str]:
    """Return variables to add to tritonserver's environment; none, and a warning, if the library cannot be built.

    Args:
        source: the C file.
        environment: environment of tritonserver so far.
        without: for the operator, the consequence of a missing library.
        macros: macros for the compiler.
    """
    try:
        library = build_library(source, cache_folder() / "native", **macros)
    except NativeError as error:
        say(f"warning: {error}; {without}")
        return {}
    return {"LD_PRELOAD": prepend([library], environment.get("LD_PRELOAD", ""))}


def build_library(source: Path, folder: Path, **macros: int) -> Path:
    """Return the shared library of a C file with these macros, built in `folder`.

    Raises:
        NativeError: there is no C compiler, it fails, or `folder` cannot be written.
    """
    flags = ["-O2", "-shared", "-fPIC", *(f"-D{name}={value}" for name, value in macros.items())]
    name = hashlib.sha256(repr(flags).encode() + source.read_bytes()).hexdigest()[:12]
    library = folder / f"{source.stem}-{os.uname().machine}-{name}.so"
    if not library.is_file():
        _compile([*compiler(), *flags, str(source), "-ldl"], source.name, library)
    return library


def compiler() -> list[str]:
    """The command of a C compiler.

    Raises:
        NativeError: there is none.
    """
    if given := os.environ.get("CC"):
        return shlex.split(given)
    for name in _COMPILERS:
        if found := shutil.which(name):
            return [found]
    raise NativeError(f"no C compiler ({', '.join(_COMPILERS)}) is on PATH, nor named by CC")


def _compile(command: list[str], source: str, library: Path) -> None:
    """Compile, and rename the output into its place, since another process may compile the same meanwhile."""
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
        raise NativeError(f"{command[0]} could not compile {source}: {said[0]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"{source} could not be compiled: {error}") from error
